"""Two network namespaces of this machine: what the tests of launchers take for two machines."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def joined_namespaces(network: str) -> Iterator[list[str]]:
    """Their names. A cable joins them: in each one ``eth0`` has an address, ``<network>.1`` and ``<network>.2``.

    Raises:
        OSError: there is no ``ip``.
        subprocess.CalledProcessError: they may not be made here.
    """

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    names = [f"titan{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for i, name in enumerate(names, 1):
            ip(f"-n {name} addr add {network}.{i}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield names
