"""Chat messages to token ids and back, for gateway, judge and teacher alike. Imports no torch."""
