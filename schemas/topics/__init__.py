"""One YAML file per topic: what it holds, who writes and reads it, and how it is created."""
