"""Quickstart: requests and client settings for a service that has just become ready, shown where it was started."""

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass
from typing import Final

from skiff_runtime import log
from skiff_runtime.contract import PATH_CHAT_COMPLETIONS, PATH_EMBEDDINGS, PATH_HOME

_PROMPT: Final = "What is a pod?"
_UNSPECIFIED: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that a server listens on but no client connects to, and those of this machine."""


@dataclass(frozen=True, slots=True)
class Quickstart:
    """A ready service as its first client sees it.

    ``keyed``: it requires an API key, which is never shown. ``generates``: False for a model that only embeds.
    """

    host: str
    port: int
    model: str
    keyed: bool
    generates: bool = True

    @property
    def url(self) -> str:
        """The service's URL on this machine."""
        host = _UNSPECIFIED.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def show(self) -> None:
        """Print the quickstart if stdout is a terminal. Otherwise log what it contains as one event."""
        if not sys.stdout.isatty():
            log.event(
                "quickstart",
                home_page=self.url + PATH_HOME,
                openai_base_url=f"{self.url}/v1",
                anthropic_base_url=self.url,
                model=self.model,
                api_key="required" if self.keyed else "none",
            )
            return
        with contextlib.suppress(OSError):  # the terminal may be gone, and the service goes on
            print(self.render(), flush=True)

    def render(self) -> str:
        """Return the text for a terminal. It names the variables in which clients expect the key, not the key."""
        shell_model, model = shlex.quote(self.model), json.dumps(self.model, ensure_ascii=False)
        key, header, imports, env_key, before = "none", "", "", "", ""
        if self.keyed:
            key = "YOUR-KEY"
            header = ' -H "Authorization: Bearer $OPENAI_API_KEY"'
            imports = "import os\n"
            env_key = '\nenv_key = "OPENAI_API_KEY"'
            before = f"export OPENAI_API_KEY={key}   # one of the service's keys\n\n"
        python_key = 'os.environ["OPENAI_API_KEY"]' if self.keyed else '"none"'
        client = f"""{imports}from openai import OpenAI
client = OpenAI(base_url="{self.url}/v1", api_key={python_key})"""
        if not self.generates:
            body = shlex.quote(json.dumps({"model": self.model, "input": _PROMPT}, ensure_ascii=False))
            return f"""
Ready: {self.model} at {self.url}

{before}# curl
curl {self.url}{PATH_EMBEDDINGS} -H 'Content-Type: application/json'{header} \\
  -d {body}

# Python
{client}
print(client.embeddings.create(model={model}, input="{_PROMPT}").data[0].embedding)
"""
        messages = [{"role": "user", "content": _PROMPT}]
        body = shlex.quote(json.dumps({"model": self.model, "messages": messages}, ensure_ascii=False))
        # The clients' own names: Codex talks to /v1/responses only, Claude Code to /v1/messages.
        return f"""
Ready: {self.model} at {self.url}, with a chat in the browser at {self.url}{PATH_HOME}

{before}# curl
curl {self.url}{PATH_CHAT_COMPLETIONS} -H 'Content-Type: application/json'{header} \\
  -d {body}

# Python
{client}
answer = client.chat.completions.create(model={model}, messages=[{{"role": "user", "content": "{_PROMPT}"}}])
print(answer.choices[0].message.content)

# Editors and tools that read OpenAI's variables
export OPENAI_BASE_URL={self.url}/v1 OPENAI_API_KEY={key}

# Codex: in ~/.codex/config.toml
model = {model}
model_provider = "skiff"
[model_providers.skiff]
name = "Skiff"
base_url = "{self.url}/v1"
wire_api = "responses"{env_key}

# Claude Code
export ANTHROPIC_BASE_URL={self.url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={shell_model}
"""
