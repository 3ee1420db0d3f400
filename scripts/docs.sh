#!/usr/bin/env bash
# Builds the documentation site in build/site. Warnings, broken links and missing anchors are errors.
#   bash scripts/docs.sh          builds it
#   bash scripts/docs.sh serve    builds it and serves it on http://127.0.0.1:8000 (PORT=... for another port)
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
(($# == 0)) || [[ $# == 1 && $1 == serve ]] || fail "usage: docs.sh [serve]"
use_environment docs
cd -- "$root"

"$python" -m scripts.docs
"$python" -m zensical build --clean --strict 2>&1 | tee build/docs.log
! grep '^griffe: ' build/docs.log >/dev/null || fail "a docstring does not fit its code: see the lines above that begin with griffe"
echo "docs.sh: the site is in $root/build/site"
((!$#)) || exec "$python" -m http.server --bind 127.0.0.1 --directory build/site "${PORT:-8000}"
