"""Many runs of one recipe: sweeps over keys, with Optuna, and several seeds at once."""
