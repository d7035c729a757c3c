"""From logs to figures, tables, the audit and the page. Nothing here imports torch."""
