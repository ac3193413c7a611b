"""One validated settings class a stage; the notebooks' parameters bear the same names.

Settings are frozen and digested before the first measurement, so a changed margin or number of pairs is another run.
"""

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualtrack.facts.digests import sha256_json


class StageSettings(BaseModel):
    """What every stage is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    workload: str = "digits"
    """Bundled name, or `package.module:factory`."""
    device: str = "auto"
    """`auto` takes `cuda` where there is one, else `cpu`."""
    seed: int = Field(default=20260101, ge=0)
    """Seeds `random`, `numpy` and `torch` before the legacy loader and the model are built."""

    @classmethod
    def parse(cls, parameters: dict[str, Any]) -> Self:
        """Validate notebook or command-line parameters.

        Raises:
            ValueError: A name is unknown (the nearest valid name is shown) or a value has the wrong type; nothing was started.
        """
        problems = [cls._unknown(name) for name in parameters if name not in cls.model_fields]
        if problems:
            raise ValueError("; ".join(problems))
        try:
            return cls(**parameters)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}" for item in error.errors()]
            raise ValueError(f"{cls.__name__}: {'; '.join(lines)}") from error

    @classmethod
    def _unknown(cls, name: str) -> str:
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid names are {', '.join(cls.model_fields)}"
        return f"{cls.__name__}: unknown parameter {name!r}; {hint}"

    def digest(self) -> str:
        """Return the digest that is taken before the first measurement."""
        return sha256_json(self.model_dump(mode="json"))
