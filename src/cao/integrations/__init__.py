"""CAO in the training loops of other packages, and ways to watch it; import each module only if you use it.

`cao.integrations.lightning`, `.transformers`, `.accelerate` and `.deepxde` each need the package of that name;
`.watching` and `.tensorboard` need no other package.
"""
