"""The variables of a run that is checked: the user's, with a length and a period of a few steps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.plan import plan
from lsgd.plan.plan import variable
from lsgd.settings import fields

ROUNDS = 8
"""About how many global rounds a run has, if its algorithm has a period."""


def variables(environ: Mapping[str, str], path: Path | None, workers: int, steps: int) -> dict[str, str]:
    """Return the variables of a run of so many workers, each of about so many steps.

    A plan that ends the run ends it then. Without one, the script's loop does, or whoever stops it.

    Raises:
        ConfigError: the plan cannot be read.
    """
    own = dict(environ)
    run = plan.read(path, environ, {}).plan
    if run.run.has_end:
        own |= {variable("iterations"): str(steps * workers), variable("seconds"): "0"}
    if run.run.workers:
        own[variable("workers")] = str(workers)
    own[variable("checkpoint_every")] = "1"
    own[variable("lease_s")] = "120"  # workers stand still while another is started again
    settings, period = run.phases[0].algorithm, max(2, steps // ROUNDS)
    names = [name for name in ("local_period", "period", "interval") if name in fields(type(settings))]
    if len(run.phases) == 1 and names and (settings.period_is_auto or settings.schedule().period > period):
        shorter = {variable(name): str(period) for name in names}
        try:
            replace(settings, **dict.fromkeys(names, period))
        except ConfigError:  # other settings forbid it
            return own
        own |= shorter
    return own
