"""Settings: dataclasses and their composition by Hydra."""
