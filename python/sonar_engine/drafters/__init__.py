"""Ways of speculating. `base` is their interface, `registry` their list."""
