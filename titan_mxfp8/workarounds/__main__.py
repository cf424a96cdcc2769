"""``python -m titan_mxfp8.workarounds``: the list of workarounds, and which of them this machine needs."""

from titan_mxfp8.workarounds import HOOKS, WORKAROUNDS

for row in WORKAROUNDS:
    here = "needed here" if row.is_for_this_machine() else "not for this machine"
    print(f"{row.name} ({here}; {row.versions})\n    changes {row.changes}\n    against {row.symptom}")
print("\nNo workarounds, but what the adapters are called by:")
for changed, purpose in HOOKS.items():
    print(f"    {changed}: {purpose}")
