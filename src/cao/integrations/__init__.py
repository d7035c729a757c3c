"""CAO in other people's training loops, and ways to watch it; each module is imported only when it is used.

`cao.integrations.lightning`, `.transformers`, `.accelerate` and `.deepxde` each need the package they are named after.
`.watching` and `.tensorboard` need none.
"""
