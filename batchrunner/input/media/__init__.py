"""Images, audio and videos of prompts: `prompts` places them, `prepare` makes what is sent of each."""
