"""Engine control: engine files (`spec`), command lines (`command`), processes (`server`), GPUs (`gpus`)."""
