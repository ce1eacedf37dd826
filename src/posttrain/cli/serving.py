"""The commands that serve: a model, a search index, a reward model, tools."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.terminal import Overrides, fail

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]


def serve(
    model: Annotated[
        str, typer.Argument(help="A run directory (its latest checkpoint), a checkpoint, a config file or a model.")
    ],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="The config whose limits and env.options hold.")] = None,
    host: str = "127.0.0.1",
    port: Port = 8001,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the clients' API key.")] = None,
    syntax: Annotated[str | None, typer.Option(help="How the model writes tool calls; default hermes.")] = None,
    record: Annotated[Path | None, typer.Option(help="A folder for all conversations, token by token.")] = None,
) -> None:
    """Serve a model to any OpenAI client, by the endpoint that external agents are trained through."""
    import asyncio

    from posttrain.loops.serve import open_desk, served_target
    from posttrain.loops.serve import serve as answer_all
    from posttrain.loops.target import check_place
    from posttrain.retrieval.command import token_of

    try:
        token = token_of(token_env)
    except ValueError as error:
        fail(error)
    if record is not None:
        check_place(record, "--record")
        record.mkdir(parents=True, exist_ok=True)
    target = served_target(model, overrides or (), config=config)
    desk = open_desk(target, syntax=syntax, folder=record)
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo(f"serving on {host} without a token: whoever reaches this machine can use the model", err=True)
    asyncio.run(answer_all(desk, host, port, token=token, say=lambda url: typer.echo(f"serving at {url}", err=True)))


def serve_search(
    index: Annotated[Path, typer.Argument(help="A folder made by `posttrain index`.")],
    host: str = "127.0.0.1",
    port: Port = 8000,
    top_k: Annotated[int, typer.Option(min=1, help="Passages per query, where the request does not say.")] = 3,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with a token that clients send.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="rerank.model=..., encoder.device=cuda, hybrid.k=60, effort=64 ..."),
    ] = None,
) -> None:
    """Serve an index over HTTP: POST /retrieve as Search-R1 has it, GET /healthz, GET /metrics."""
    from posttrain.retrieval.command import open_for_serving, token_of

    try:
        from posttrain.retrieval.server import create_app, serve

        retriever, about = open_for_serving(index, settings or ())
        token = token_of(token_env)
    except (ImportError, ValueError) as error:
        fail(error)
    serve(create_app(retriever, default_top_k=top_k, about=about, token=token), host, port, open_to_all=token is None)


def serve_reward(
    model: Annotated[str, typer.Argument(help="A sequence classifier: directory or hub id.")],
    host: str = "127.0.0.1",
    port: Port = 5000,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with a token that clients send.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="device=cuda, max_tokens=8192 ...")] = None,
) -> None:
    """Serve a reward model over HTTP as OpenRLHF does: POST /get_reward, GET /healthz."""
    from posttrain.config import RewardConfig
    from posttrain.retrieval.command import nested
    from posttrain.rewards.config import load_reward
    from posttrain.rewards.service import secret
    from posttrain.runs.config_file import parse_config

    try:
        options = nested(settings or ())
        from posttrain.rewards.server import create_app, serve
    except (ImportError, ValueError) as error:
        fail(error)
    loaded: Any = load_reward(parse_config(RewardConfig, {"name": "model", "options": {"path": model, **options}}))
    token = secret(token_env) or None
    serve(create_app(loaded, token=token), host, port, open_to_all=token is None)


def serve_tools(
    tools: Annotated[
        list[str] | None, typer.Argument(help="Online tools by name, functions as file.py:name; default: all built-in.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with the keys `tools` and `mcp`.")] = None,
    stdio: Annotated[bool, typer.Option("--stdio", help="Speak on standard input and output, as a child.")] = False,
    host: str = "127.0.0.1",
    port: Port = 8000,
    token_env: Annotated[str | None, typer.Option(help="The environment variable with the clients' token.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Another name of this machine for clients.")] = None,
) -> None:
    """Serve tools to any MCP client, over streamable HTTP at /mcp or over stdio."""
    try:
        from posttrain.tools.mcp.offer import ToolOffer
        from posttrain.tools.mcp.serve import serve
    except ImportError as error:
        fail(error)
    from posttrain.runs.config_file import load_config, parse_config

    given = {"tools": tools} if tools else {}
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    offer = parse_config(ToolOffer, given) if config is None else load_config(ToolOffer, config, overrides)
    say = partial(typer.echo, err=True)
    serve(offer, stdio=stdio, host=host, port=port, token_env=token_env, allowed_hosts=allow_host or (), say=say)
