# The public names, and where each is; rewriter/__init__.py reads this file too, and imports a name when it is used.
from rewriter.api.comparing import Benchmark as Benchmark
from rewriter.api.comparing import bench as bench
from rewriter.api.comparing import certify as certify
from rewriter.api.comparing import diff as diff
from rewriter.api.comparing import validate as validate
from rewriter.api.diagnosing import doctor as doctor
from rewriter.api.rewriting import Inspection as Inspection
from rewriter.api.rewriting import inspect as inspect
from rewriter.api.rewriting import rewrite as rewrite
from rewriter.errors import ExitStatus as ExitStatus
from rewriter.errors import ModelError as ModelError
from rewriter.errors import NothingToConvertError as NothingToConvertError
from rewriter.errors import ProviderError as ProviderError
from rewriter.errors import RewriteError as RewriteError
from rewriter.errors import UsageError as UsageError
from rewriter.errors import ValidationError as ValidationError
from rewriter.interpret.attribute import attribute as attribute
from rewriter.interpret.attribute import why as why
from rewriter.interpret.graph import attribution_graph as attribution_graph
from rewriter.interpret.index import heads as heads
from rewriter.interpret.interventions import ablate as ablate
from rewriter.interpret.interventions import changed_heads as changed_heads
from rewriter.interpret.interventions import freeze as freeze
from rewriter.interpret.interventions import patch as patch
from rewriter.interpret.page import head_pictures as head_pictures
from rewriter.interpret.rank import compositions as compositions
from rewriter.interpret.rank import head_tokens as head_tokens
from rewriter.interpret.run import Text as Text
from rewriter.interpret.run import run_with_cache as run_with_cache
from rewriter.report.report import Certification as Certification
from rewriter.report.report import Comparison as Comparison
from rewriter.report.report import FolderReport as FolderReport
from rewriter.report.report import Report as Report
from rewriter.report.report import RuntimeCertification as RuntimeCertification

def require_own_passes() -> None: ...

__version__: str
