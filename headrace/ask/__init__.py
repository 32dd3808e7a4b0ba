"""From a model and a machine to a plan, with its times, its wear, and variants that would fit."""
