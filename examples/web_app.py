"""A chat in the browser: one page, one route, and answers that appear word by word.

    python examples/web_app.py                          # the default model, http://127.0.0.1:8000
    python examples/web_app.py --model MODEL --port 80

What it teaches: an app makes one `LLM` and calls it from as many threads as it likes. Every visitor has a thread of the
web server here; each submits a conversation, iterates over the chunks of the answer, and the model runs all of them
together. When the page is closed or Stop is pressed, the handle is cancelled, and its row is free for the next.

`http_events.py` is the server beneath it. The page asks with `fetch` and not with EventSource, because a conversation
is too long for an address.
"""

import argparse
import sys
from json import loads

from http_events import Handler, Json, Refused, Server

from minillm import LLM, MinillmError, SamplingParams
from minillm.errors import RequestError, TokenizerError
from minillm.hub import default_model

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>minillm</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem }
  p { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .9rem; border-radius: .6rem; background: #f3f3f3 }
  .user { background: #e3edfd; margin-left: 4rem } .error { color: #b00020 }
  form { display: flex; gap: .5rem; position: sticky; bottom: 0; background: #fff; padding: .6rem 0 }
  textarea, button { font: inherit; padding: .5rem 1rem } textarea { flex: 1 }
</style>
<main aria-live="polite"></main>
<form><textarea placeholder="Ask something. Enter sends, Shift+Enter makes a new line." autofocus></textarea>
<button>Send</button></form>
<script>
const [talk, form, box, button] = ["main", "form", "textarea", "button"].map(name => document.querySelector(name));
const messages = [];
let running = null;
function show(kind, text) {
  const line = talk.appendChild(document.createElement("p"));
  [line.className, line.textContent] = [kind, text];  // never as HTML: a model may write anything
  return line;
}
async function answer(line) {
  const reply = await fetch("/chat", {method: "POST", signal: running.signal, body: JSON.stringify({messages}),
                                      headers: {"Content-Type": "application/json"}});
  if (!reply.ok) throw Error((await reply.json()).error);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reader.read()).done;) {
    const events = (held + part.value).split("\\n\\n");
    held = events.pop();
    for (const data of events.map(event => JSON.parse(event.slice("data: ".length)))) {
      if (data.error) throw Error(data.error);
      line.textContent += data.text;
    }
    scrollTo(0, document.body.scrollHeight);
  }
}
form.onsubmit = async event => {
  event.preventDefault();
  if (running) return running.abort();
  if (!box.value.trim()) return;
  messages.push({role: "user", content: box.value});
  show("user", box.value);
  const line = show("assistant", "");
  [running, box.value, button.textContent] = [new AbortController(), "", "Stop"];
  try { await answer(line); } catch (error) { if (error.name !== "AbortError") show("error", error.message); }
  if (line.textContent) messages.push({role: "assistant", content: line.textContent});
  else { messages.pop(); line.remove(); }
  [running, button.textContent] = [null, "Send"];
};
box.onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !running) { event.preventDefault(); form.requestSubmit(); }
};
</script></html>
"""


class Chat(Handler):
    """The page, and the route that it asks."""

    server: "WebApp"

    def answer(self, method: str, path: str, body: bytes) -> None:
        if (method, path) == ("GET", "/"):
            return self.reply(200, PAGE)
        # a page of another site cannot send JSON without asking first, and it is never told that it may
        if (method, path) != ("POST", "/chat") or self.headers.get_content_type() != "application/json":
            raise Refused(404, f"there is nothing to {method} at {path}")
        try:
            messages = loads(body)["messages"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused(400, 'a question is JSON: {"messages": [{"role": "user", "content": "Hi"}]}') from None
        with self.cancelling() as handles:
            handles.append(self.server.llm.submit_chat(messages, self.server.params))
            self.send_events({"text": chunk.text} for chunk in handles[0])

    def refusal(self, error: Exception) -> tuple[int, Json]:
        if isinstance(error, Refused):
            return error.status, {"error": str(error)}
        if not isinstance(error, MinillmError):  # a bug, and what it says is not for the page to show
            return 500, {"error": "the server failed: its log tells how"}
        return 400 if isinstance(error, (RequestError, TokenizerError)) else 503, {"error": str(error)}


class WebApp(Server):
    """The server, with what its threads share."""

    def __init__(self, address: tuple[str, int], llm: LLM, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        super().__init__(address, Chat)


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat in the browser. Ctrl-C ends it.")
    add = parser.add_argument
    add("--model", help="directory, .gguf file, or hub id org/name (default: SmolLM2-135M-Instruct, fetched once)")
    add("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: %(default)s, this one alone)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    options, params = parser.parse_args(), SamplingParams(max_tokens=1024, temperature=0.7, top_p=0.95)
    try:
        with (
            LLM(options.model or default_model(chat=True), progress=sys.stderr.isatty()) as llm,
            WebApp((options.host, options.port), llm, params) as app,
        ):
            print(f"http://{options.host}:{app.server_port}")
            app.serve_forever()
    except (MinillmError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
