"""Where verdicts come from: one file per kind of judge. `interface` says what a backend is."""
