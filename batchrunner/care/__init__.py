"""Engine care: see what SGLang does, explain it, advise, heal, tune."""
