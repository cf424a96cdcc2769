"""Two network namespaces of this machine, which tests of launchers take for two machines; a SLURM cluster of two nodes,
each with a host name and a network of its own."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")
# autobind, DefMemPerCPU: settings of many sites, at which a launcher may stumble
CONF = """
ClusterName=titan
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=autobind=cores
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
DefMemPerCPU=1
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=2 Sockets=2 CoresPerSocket=1 RealMemory=4000 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES
"""
# In a mount and a host name space of its own: the hosts file, the name, then the command.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def missing() -> str:
    """Why there can be no cluster here, or an empty string."""
    absent = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"not installed (slurm-wlm, munge, iproute2): {', '.join(absent)}"
    spaces = subprocess.run(["unshare", "--mount", "--uts", "--net", "true"], capture_output=True)
    return "may not make network namespaces here" if spaces.returncode else ""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    spaces: list[str]

    def command(self, *command: str, node: int = 1) -> list[str]:
        """``command`` as it must be called to run on a node."""
        space = [f"--net=/run/netns/{self.spaces[node - 1]}", "unshare", "--mount", "--uts"]
        return ["nsenter", *space, "sh", "-c", ENTER, "sh", str(self.folder / "hosts"), f"node{node}", *command]

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """What a command of SLURM's prints on the first node."""
        env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | environment
        done = subprocess.run(self.command(*command), cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def pids(self, node: int) -> list[int]:
        return [*map(int, subprocess.check_output(["ip", "netns", "pids", self.spaces[node - 1]], text=True).split())]


@contextmanager
def joined_namespaces(network: str) -> Iterator[list[str]]:
    """Their names. A cable joins them: in each one ``eth0`` has an address, ``<network>.1`` and ``<network>.2``. Raises
    OSError where there is no ``ip``, CalledProcessError where they may not be made."""

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


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    (folder / "state").mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.98.0.1 node1\n10.98.0.2 node2\n")
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")  # nothing opens it
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # slurmd looks for one, no plugin above uses it
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)

    with ExitStack() as stack, (folder / "daemons.log").open("w") as log:
        cluster = Cluster(folder, stack.enter_context(joined_namespaces("10.98.0")))

        def kill_all() -> None:
            """What is left of the jobs: it would outlive the daemons."""
            for pid in (pid for node in (1, 2) for pid in cluster.pids(node)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        def start(*command: str) -> None:
            env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)

        stack.callback(kill_all)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        start(*cluster.command("slurmctld", "-D"))
        for node in (1, 2):
            start(*cluster.command("slurmd", "-D", node=node))
        deadline = time.monotonic() + 60
        while cluster.run("sh", "-c", "sinfo --noheader --format=%D --states=idle || true") != "2":
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.2)
        yield cluster
