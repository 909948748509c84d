"""Topics as Parquet files, for archives beyond retention, and back."""
