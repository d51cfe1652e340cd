#!/usr/bin/env bash
# Builds src/headway/page/templates/plotly.min.js: plotly.js with the traces that Headway's pages draw, and no others.
# It has 1.8 MB where the whole library has 4.8. Needs node 18 or later and npm. Run it to raise the version.
set -euo pipefail
version=${1:-4.1.1} esbuild=${2:-0.28.2}
to=$(realpath "$(dirname "$0")/../src/headway/page/templates")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init --yes >/dev/null
npm install --ignore-scripts "plotly.js@$version" "esbuild@$esbuild" >/dev/null
node node_modules/esbuild/install.js
cat >bundle.js <<'JS'
const Plotly = require("plotly.js/lib/core"); // with scatter
Plotly.register([
  require("plotly.js/lib/bar"),
  require("plotly.js/lib/heatmap"),
  require("plotly.js/lib/contour"),
  require("plotly.js/lib/surface"),
]);
module.exports = Plotly;
JS
npx esbuild bundle.js --bundle --minify --format=iife --global-name=Plotly --define:global=window --legal-comments=eof \
  --banner:js="/* plotly.js v$version (scatter, bar, heatmap, contour, surface), MIT License, (c) Plotly, Inc. */" \
  --outfile=plotly.min.js
cp plotly.min.js "$to/plotly.min.js"
cp node_modules/plotly.js/LICENSE "$to/plotly.LICENSE"
