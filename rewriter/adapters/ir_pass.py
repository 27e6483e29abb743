"""For onnx-ir: the rewriting as a pass, and any pass or rule set with a proof of its result; needs the extra `ir`."""

from typing import Any, Unpack

from rewriter.api.comparing import certify
from rewriter.api.rewriting import rewrite
from rewriter.api.run import RewriteKeywords
from rewriter.errors import ExitStatus, RewriteError, UsageError
from rewriter.report.report import Certification, Report

try:
    import onnx_ir as ir
    from onnx_ir.passes import FunctionalPass, PassBase, PassResult, PostconditionError, PreconditionError
except ImportError as error:
    raise UsageError("passes of onnx-ir need the package onnx-ir: pip install 'attnonly[ir]'") from error


class AttentionOnlyPass(FunctionalPass):
    """Replace the MLP blocks of a model by attention heads, and prove it.

    The given model is unchanged. `ensures` is the proof: a pass whose result is not proved raises PostconditionError,
    so no later pass sees it. `report` is the `Report` of the last call.
    """

    def __init__(self, *, needed: bool = False, **options: Unpack[RewriteKeywords]) -> None:
        """`needed`: a model without a block breaks the precondition; `options` are those of `rewriter.rewrite`."""
        self._needed, self._options = needed, options
        self._result: ir.Model | None = None
        self.report: Report | None = None

    def requires(self, model: ir.Model) -> None:
        """Raise PreconditionError if the model is unsound, an option is wrong, or a block is needed and missing."""
        try:
            plan = rewrite(model, dry_run=True, **self._options)
        except RewriteError as error:
            raise PreconditionError(str(error)) from error
        if self._needed and not plan.converted:
            raise PreconditionError(plan.summary)

    def call(self, model: ir.Model) -> PassResult:
        """The rewritten model, or a copy if nothing was converted or the proof failed."""
        self._result, self.report = None, None
        try:
            self.report = rewrite(model, **self._options)
        except RewriteError as error:
            raise PostconditionError(f"the proof could not be carried out: {error}") from error
        made = self.report.in_memory
        # `rewritten` is of the kind that was given, which its type cannot say.
        self._result = made if isinstance(made, ir.Model) else model.clone()
        return PassResult(self._result, modified=made is not None)

    def ensures(self, model: ir.Model) -> None:
        """Raise PostconditionError if the proof failed, or judged another model."""
        if self.report is None or model is not self._result:
            raise PostconditionError("this model is not the one that the pass made and proved")
        if self.report.exit_status is ExitStatus.VALIDATION_FAILED:
            raise PostconditionError("; ".join((self.report.summary, *self.report.problems[:3])))


class Certified(FunctionalPass):
    """Run a pass on a copy of a model, and prove that the result computes what the model does.

    A result that is not certified raises PostconditionError, which says where it departs. `certification` is what was
    proved in the last call.
    """

    def __init__(self, rewriting: Any, **options: Any) -> None:
        """`rewriting`: a pass, or rules with `apply_to_model`; `options` are those of `rewriter.certify`."""
        if not isinstance(rewriting, PassBase) and not hasattr(rewriting, "apply_to_model"):
            raise UsageError(f"a pass of onnx-ir or a rule set of onnxscript is needed, not {rewriting!r}")
        self._rewriting, self._options = rewriting, options
        self.certification: Certification | None = None

    def call(self, model: ir.Model) -> PassResult:
        """The result, proved."""
        self.certification = None
        copy = model.clone()
        if isinstance(self._rewriting, PassBase):
            result = self._rewriting(copy)
        else:
            result = PassResult(copy, modified=bool(self._rewriting.apply_to_model(copy)))
        try:
            found = self.certification = certify(model, result.model, **self._options)
        except RewriteError as error:
            raise PostconditionError(f"the result cannot be proved: {error}") from error
        if not found:
            departure = found.certificate.departure
            lines = () if departure is None else departure.lines()
            raise PostconditionError(f"{found.verdict}: {'; '.join((*found.problems, *lines))}")
        return result
