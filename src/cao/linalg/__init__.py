"""Linear algebra on tall blocks of columns, of one process or of shards; it knows no model."""
