"""``python -m titan_mxfp8.workarounds``: the list of workarounds, and which of them this machine needs."""

import inspect

from titan_mxfp8.workarounds import HOOKS, WORKAROUNDS

for row in WORKAROUNDS:
    here = "needed here" if row.is_for_this_machine() else "not for this machine"
    print(f"{row.name} ({here}; {row.versions})\n    changes {' '.join(row.changes)}")
    print("    against " + inspect.getdoc(row.install).replace("\n", "\n    "))
print("\nNo workarounds, but what the adapters are called by:")
for changed, purpose in HOOKS.items():
    print(f"    {changed}: {purpose}")
