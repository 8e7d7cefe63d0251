"""How the commands of `scripts/` end: a DeltaError is a message on stderr and exit code 2."""

import typer

from delta.errors import DeltaError


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line as the program of that name."""
    try:
        app(prog_name=name)
    except DeltaError as error:
        typer.echo(f"{name}: {error}", err=True)
        raise SystemExit(2) from None
