"""Images, audio and videos of prompts: `prompts` places them, `prepare` reads and converts the files."""
