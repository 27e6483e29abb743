"""Print the README's two set-up commands, one per line: the first two shell blocks of the section `Set up`."""

import re
import sys
from pathlib import Path

section = Path(sys.argv[1]).read_text(encoding="utf-8").split("## Set up", 1)[1].split("\n## ", 1)[0]
blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", section, re.DOTALL)[:2]
if len(blocks) != 2:
    sys.exit("the README's section 'Set up' must have two shell blocks")
for block in blocks:
    sys.stdout.write(" ".join(line.rstrip("\\").strip() for line in block.strip().splitlines()) + "\n")
