"""Client profiles: one TOML file of patterns per agent. `services.gateway.client_profiles` explains the fields."""
