"""What `rewrite certify` proved about two models, as data and as JSON.

`certificate.schema.json` beside this file is the contract of the JSON. Whoever has the two files can have it computed
again: `rewrite certify --check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.errors import ExitStatus, UsageError
from rewriter.proof.certificate.certify import Certificate, CertifiedRegion
from rewriter.report.report import VERSION, Result, json_text
from rewriter.text import quoted

_LONGEST = 2**28


@dataclass(frozen=True)
class FileDigest:
    """One of the two models.

    Attributes:
        path: as given.
        sha256: of the model file.
        data: of the data files that it refers to, by location.
    """

    path: str
    sha256: str
    data: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class Certification(Result):
    """What was proved about two models, for every input of every size.

    Attributes:
        original: the specification.
        rewritten: the model that was judged.
        certificate: what was proved.
    """

    original: FileDigest
    rewritten: FileDigest
    certificate: Certificate

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if certified, 1 if refused."""
        return ExitStatus.CONVERTED if self.certificate.certified else ExitStatus.VALIDATION_FAILED

    @property
    def worst(self) -> CertifiedRegion | None:
        """The region with the largest bound; None where there is none."""
        return max(self.certificate.regions, key=lambda region: region.bound.bound, default=None)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it was not certified."""
        return tuple(refusal.text for refusal in self.certificate.refusals)

    @property
    def summary(self) -> str:
        """The verdict, and the largest bound."""
        pair = f"{self.rewritten.path} against {self.original.path}"
        if not self.certificate.certified:
            return f"REFUSED {pair}"
        count = len(self.certificate.regions)
        return f"CERTIFIED {pair}: {count} activation{'s' if count != 1 else ''} replaced, {self.accuracy}"

    @property
    def accuracy(self) -> str:
        """The largest bound, in words."""
        worst = self.worst
        if worst is None or worst.bound.bound == 0.0:
            return "exactly the same function"
        return f"each within {worst.bound.bound:.2g} max(1, |f|)"

    def differences(self, stated: Mapping[str, Any]) -> Iterator[str]:
        """What does not hold of a certificate that was read, this one being computed from the files.

        Times and paths may differ.
        """
        ours = json.loads(json_text(self.to_json()))
        for name, what in (("original", "original"), ("rewritten", "rewritten model")):
            if {**ours[name], "path": ""} != {**stated[name], "path": ""}:
                yield f"the {what} is another file than it states"
        one, two = ours["certificate"], stated["certificate"]
        if one["certified"] != two.get("certified"):
            yield f"it states that the pair is {'refused' if one['certified'] else 'certified'}"
        if any(one[key] != two.get(key) for key in ("assumed", "not_claimed")):
            yield "it rests on other assumptions"
        regions, others = ({_name(region): region for region in each["regions"]} for each in (one, two))
        for name in sorted(regions.keys() ^ others.keys()):
            yield f"{'it lacks' if name in regions else 'there is no'} region {quoted(name)}"
        for name in sorted(regions.keys() & others.keys()):
            if regions[name] != others[name]:
                yield f"region {quoted(name)} is not as it states"


def _name(region: Mapping[str, Any]) -> str:
    return "/".join(str(region.get(key)) for key in ("path", "original", "rewritten")).removeprefix("[]/")


def read_certificate(path: Path) -> Mapping[str, Any]:
    """Read a certificate that `Certification.write` wrote.

    Raises:
        UsageError: the file cannot be read, or is no certificate of this version.
    """
    try:
        if path.stat().st_size > _LONGEST:
            raise UsageError(f"{quoted(path)} is too large for a certificate; pass what `rewrite certify -o` wrote")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{quoted(path)} cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{quoted(path)} is not JSON; pass what `rewrite certify -o` wrote") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise UsageError(f"{quoted(path)} is no certificate of version {VERSION}; make it again")
    parts = [content.get(key) for key in ("original", "rewritten", "certificate")]
    regions = parts[2].get("regions") if isinstance(parts[2], dict) else None
    if not isinstance(regions, list) or not all(isinstance(each, dict) for each in (*parts, *regions)):
        raise UsageError(f"{quoted(path)} is not what `rewrite certify -o` writes; make it again")
    return content
