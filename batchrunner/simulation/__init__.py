"""SGLang's scheduler in virtual time: pure code, no clock, no threads, no engine."""
