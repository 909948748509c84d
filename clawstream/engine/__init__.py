"""The inference engine as clawstream sees it: SGLang's HTTP API, or `services.engine`, which speaks the same."""
