"""The caches of keys and values: how they lie while their block does not run."""
