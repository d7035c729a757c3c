"""The log of a run: its records, and how they are written and read. docs/log-format.md is the contract."""
