"""A server for `launchable` that one row kills: it answers lists of token ids, and dies of `[117]`."""

FRAGILE = """
class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 32},
        "/v1/loads": {"loads": [{
            "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 32,
            "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0, "timestamp": 1.0}]},
    }
    def sample(self, prompt):
        if prompt == [117]:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        return {"text": f"answer 0 to {prompt}", "meta_info": {
            "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 2}}
    def asked(self, body):
        prompts = body["input_ids"]
        if not isinstance(prompts[0], list):
            self.reply(200, self.sample(prompts))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for index, prompt in enumerate(prompts):
            event = json.dumps({**self.sample(prompt), "index": index})
            self.wfile.write(f"data: {event}\\n\\n".encode())
            self.wfile.flush()
"""
