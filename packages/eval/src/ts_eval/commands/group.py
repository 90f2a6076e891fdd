"""What every command of `ts-eval` shares: errors that end in one sentence, and exit statuses."""

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from decoder.collecting import uncollected

WRONG_INPUT = 2
INTERRUPTED = 130


class SentenceGroup(click.Group):
    """A group whose errors end in one sentence; a command's return value is its exit status."""

    def main(self, args=None, prog_name=None, complete_var=None, standalone_mode=True, **extra):
        arguments = list(sys.argv[1:] if args is None else args)

        def run():
            named = {"standalone_mode": False, "obj": arguments, **extra}
            return super(SentenceGroup, self).main(arguments, prog_name, complete_var, **named)

        if not standalone_mode:
            return run()
        try:
            status = run()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = WRONG_INPUT
        except click.ClickException as error:
            click.echo(f"ts-eval: {error.format_message()}", err=True)
            status = WRONG_INPUT
        except click.Abort:
            click.echo("ts-eval: interrupted.", err=True)
            status = INTERRUPTED
        sys.exit(status)


@contextmanager
def told_in_a_sentence(kept_in: str | None = None) -> Iterator[None]:
    """Check the command's arguments, and turn the errors that an input can cause into one line without a traceback.

    Args:
        kept_in: the folder of a command that goes on where it was interrupted, which it then tells.
    """
    # Imported here because it brings torch, which --help and wrong usage should not cost.
    with uncollected():
        from decoder.parts import check, is_first_to_tell

    context = click.get_current_context()
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    try:
        for name, value in context.params.items():
            check(value, flags[name])
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"{flags[name]} must be a finite number, not {number}")
        yield
    except KeyboardInterrupt:
        if kept_in is None:
            raise
        kept = f"what was generated is kept in {kept_in}; the same command resumes there."
        click.echo(f"\nts-eval: interrupted; {kept}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (ValueError, OSError, MemoryError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename and error.strerror:
            sentence = f"{error.filename}: {error.strerror}"
        if context.params.get("tensor_parallel") and not is_first_to_tell(sentence):
            sys.exit(WRONG_INPUT)
        # What Python calls max_new_tokens is --max-new-tokens here.
        of_field = re.match(r"(\w+) must ", sentence)
        if of_field and flags.get(of_field[1], "").startswith("--"):
            sentence = flags[of_field[1]] + sentence[of_field.end(1) :]
        raise click.ClickException(sentence) from error


def quiet_libraries() -> None:
    """No bars for what takes a second, no retries before the one sentence that says what is missing."""
    import huggingface_hub
    import transformers

    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()


def show(*parts) -> None:
    """`terminal.show`, for whose imports help and wrong usage need not wait."""
    from ts_eval.commands import terminal

    terminal.show(*parts)
