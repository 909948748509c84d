"""The architectures that the tests serve. Without this list SGLang imports more than a hundred, for half a minute."""
