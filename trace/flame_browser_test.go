// SPDX-License-Identifier: Apache-2.0

//go:build browser

package trace

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// acting operates the picture as a reader does, and writes the results into the details.
const acting = `<script><![CDATA[
var said = [], details = document.getElementById("details"), pattern = "";
window.prompt = function () { return pattern; };
function box(name) { return document.querySelector('g.f[data-n="' + name + '"]'); }
function note(what) {
  var seen = Array.prototype.filter.call(document.querySelectorAll("g.f"), function (g) { return g.style.display !== "none"; });
  said.push(what + ": " + seen.map(function (g) { return g.getAttribute("data-n"); }).join(" ") + " | " + details.textContent);
}
function press(on, key, ctrl) { on.dispatchEvent(new KeyboardEvent("keydown", {key: key, ctrlKey: ctrl, bubbles: true})); }
note("first");
box("leaf1").dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
note("over");
box("leaf1").dispatchEvent(new MouseEvent("mouseout", {bubbles: true}));
box("leaf1").dispatchEvent(new MouseEvent("click", {bubbles: true}));
note("zoom");
said.push("width " + box("leaf1").querySelector("rect").getAttribute("width"));
press(document.getElementById("reset"), "Enter");
note("reset");
pattern = "^(caller|leaf2|user)";
press(document, "f", true);
note("found");
said.push("colour " + box("leaf2").querySelector("rect").getAttribute("fill"));
pattern = "(";
press(document.getElementById("search"), " ");
said.push(details.textContent.slice(0, 26));
press(document, "Escape");
note("escape");
details.textContent = "SAID\n" + said.join("\n") + "\nEND";
]]></script></svg>`

// TestFlameGraphInBrowser opens a flame graph in Chromium: zooming and searching work. Among 3,000 samples, the
// zoomed box is narrower than a tenth of a pixel.
func TestFlameGraphInBrowser(t *testing.T) {
	var browser string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = cmp.Or(browser, path)
		}
	}
	if browser == "" {
		t.Fatal("no Chromium here: apt install chromium")
	}
	stacks := []ProfileStack{{Program: "user", Phase: phaseUser, Samples: 2000}}
	for _, leaf := range []string{"leaf0", "leaf1", "leaf2"} {
		stacks = append(stacks, ProfileStack{Program: "p", Frames: []string{leaf, "caller"}, Phase: phases[0], Samples: 1})
	}
	svg, _ := readFlameGraph(t, profileOf(stacks...))
	file := filepath.Join(t.TempDir(), "flame.svg")
	if err := os.WriteFile(file, []byte(strings.Replace(svg, "</svg>", acting, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu",
		"--user-data-dir="+t.TempDir(), "--dump-dom", "file://"+file).Output()
	if err != nil {
		t.Fatalf("%s: %v", browser, err)
	}
	_, said, _ := strings.Cut(string(out), "SAID\n")
	said, _, _ = strings.Cut(said, "\nEND")
	const boxes = "all p caller leaf0 leaf1 leaf2 user [user programs]"
	want := strings.Join([]string{
		"first: " + boxes + " | 100 forwarded packets; click a box to zoom",
		"over: " + boxes + " | leaf1: 1 samples, 0.05 %, driver",
		"zoom: all p caller leaf1 | 100 forwarded packets; click a box to zoom",
		"width 1179.5",
		"reset: " + boxes + " | 100 forwarded packets; click a box to zoom",
		"found: " + boxes + " | ^(caller|leaf2|user): 100.00 % of the samples",
		"colour #e600e6",
		"Invalid regular expression",
		"escape: " + boxes + " | 100 forwarded packets; click a box to zoom"}, "\n")
	if said != want {
		t.Errorf("said:\n%s\nwant:\n%s", said, want)
	}
}
