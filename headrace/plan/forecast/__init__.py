"""Memory and seconds that a plan forecasts."""
