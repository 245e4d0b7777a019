"""What programs do with the newest clients of OpenAI's and Anthropic's APIs, in a Python that has
them: newest_clients.py URL MODEL CLIENT. Each raises where its client does not work."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel

SAY = [{"role": "user", "content": "Say hello."}]
# Not `strict`, as most programs send tools. A model with random weights would never end a string.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "A city's weather.", "parameters": SCHEMA},
}
TOKENS = 600


def check(arguments: str) -> None:
    assert json.loads(arguments).keys() == {"city"}, arguments


def refused(kind: Any, call: Callable[[], Any]) -> Any:
    """The body of the error that a call must end with."""
    try:
        call()
    except kind as error:
        return error.body
    raise AssertionError(f"no {kind.__name__}")


def with_openai(url: str, model: str) -> None:
    openai = import_module("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": TOKENS}
    assert client.chat.completions.create(**asked).usage.completion_tokens > 0
    events = list(client.chat.completions.create(**asked, stream=True))
    assert events[-1].choices[0].finish_reason in ("length", "stop")
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tools=[TOOL], tool_choice=choice)
        check(answer.choices[0].message.tool_calls[0].function.arguments)
    assert client.responses.create(model=model, input="Hi", max_output_tokens=4).output
    for wrong in ({"messages": None}, {"structured_outputs": {"regex": "["}, "stream": True}):
        create = partial(client.chat.completions.create, extra_body=wrong)
        body = refused(openai.BadRequestError, partial(create, model=model, messages=SAY))
        assert body["message"]
    body = refused(openai.NotFoundError, partial(client.embeddings.create, model=model, input="x"))
    assert "makes no embeddings" in body["message"]


def with_anthropic(url: str, model: str) -> None:
    anthropic = import_module("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "messages": SAY, "max_tokens": TOKENS}
    assert client.messages.create(**asked).usage.output_tokens > 0
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason in ("max_tokens", "end_turn")
    tool = {"name": "weather", "description": "A city's weather.", "input_schema": SCHEMA}
    answer = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    used = [one.input.keys() for one in answer.content if one.type == "tool_use"]
    assert used
    assert all(keys == {"city"} for keys in used)
    unheard = partial(client.messages.create, **asked | {"model": "unheard"})
    assert refused(anthropic.NotFoundError, unheard)["error"]["type"] == "not_found_error"


def with_litellm(url: str, model: str) -> None:
    completion = import_module("litellm").completion
    asked: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": SAY,
        "max_tokens": TOKENS,
    }
    assert completion(**asked).usage.completion_tokens > 0
    assert list(completion(**asked, stream=True))
    answer = completion(**asked, tools=[TOOL], tool_choice="required")
    check(answer.choices[0].message.tool_calls[0].function.arguments)


def with_langchain(url: str, model: str) -> None:
    class Weather(BaseModel):
        """A city's weather."""

        city: Literal["Paris", "Rome"]

    chat = import_module("langchain_openai").ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", max_tokens=TOKENS, max_retries=0
    )
    assert chat.invoke("Hi").usage_metadata
    assert list(chat.stream("Hi"))
    for method in ("function_calling", "json_schema"):
        found = chat.with_structured_output(Weather, method=method).invoke("Paris")
        assert isinstance(found, Weather), method


def with_agents(url: str, model: str) -> None:
    agents, openai = import_module("agents"), import_module("openai")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """A city's weather."""
        asked.append(city)
        return "It is sunny."

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = agents.Agent(
        name="one",
        tools=[agents.function_tool(weather)],
        model=agents.OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=TOKENS),
    )
    asyncio.run(agents.Runner.run(agent, "What is the weather in Paris?", max_turns=4))
    assert asked


if __name__ == "__main__":
    globals()[f"with_{sys.argv[3]}"](sys.argv[1], sys.argv[2])
