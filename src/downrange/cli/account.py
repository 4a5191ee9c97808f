"""The account that commands sign their requests with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from downrange.settings import ConfigError, secret_warning, tools_file

if TYPE_CHECKING:
    from pathlib import Path

    from downrange.client.config import ClientConfig


def client_config(namesrv: str | None) -> ClientConfig:
    """Settings of a command's client: its account is that of the environment, else that of mqadmin's tools.yml."""
    from downrange.client.config import ClientConfig

    config = ClientConfig.of(namesrv)
    path = tools_file()
    if config.access_key is not None or path is None:
        return config
    access_key, secret_key = _keys(path)
    return replace(config, access_key=access_key, secret_key=secret_key)


def _keys(path: Path) -> tuple[str | None, str | None]:
    """Access key and secret key of a tools.yml; None when it has neither."""
    from downrange.auth.acl_yaml import YamlError, read_yaml

    try:
        content = read_yaml(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from None
    keys = [content.get(name) if isinstance(content, dict) else None for name in ("accessKey", "secretKey")]
    if keys == [None, None]:
        return None, None
    if not all(isinstance(key, str) and key for key in keys):
        raise ConfigError(f"{path}: expected accessKey and secretKey, two texts")
    if warning := secret_warning(path, "secretKey"):
        typer.echo(f"downrange: warning: {warning}", err=True)
    return keys[0], keys[1]
