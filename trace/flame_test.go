// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/xml"
	"strings"
	"testing"
)

// flameBox has the attributes of a box that the script reads.
type flameBox struct {
	Name    string  `xml:"data-n,attr"`
	Start   uint64  `xml:"data-x,attr"`
	Samples uint64  `xml:"data-s,attr"`
	Title   string  `xml:"title"`
	Label   string  `xml:"text"`
	Rect    rectXML `xml:"rect"`
}

type rectXML struct {
	Width float64 `xml:"width,attr"`
	Fill  string  `xml:"fill,attr"`
}

// readFlameGraph draws the profile and reads the boxes of the picture.
func readFlameGraph(t *testing.T, p *Profile) (svg string, boxes []flameBox) {
	t.Helper()
	var b bytes.Buffer
	if err := p.WriteFlameGraph(&b); err != nil {
		t.Fatal(err)
	}
	var picture struct {
		Groups []struct {
			ID    string     `xml:"id,attr"`
			Boxes []flameBox `xml:"g"`
		} `xml:"g"`
	}
	if err := xml.Unmarshal(b.Bytes(), &picture); err != nil {
		t.Fatalf("not XML: %v\n%s", err, &b)
	}
	for _, g := range picture.Groups {
		if g.ID == "frames" {
			boxes = g.Boxes
		}
	}
	return b.String(), boxes
}

// TestFlameGraphOfAnyNames: the name of a program may contain any bytes.
func TestFlameGraphOfAnyNames(t *testing.T) {
	names := []string{`a<b>"c'&`, "]]></script>", "größe größe größe", "\x1b[31m\x01", "cut \xe3\x81", "_RNvXs_NtCs1a_6kernel5error&<T as core::fmt::Debug>::fmt"}
	var stacks []ProfileStack
	for i, name := range names {
		stacks = append(stacks, ProfileStack{Program: name, Frames: []string{name}, Phase: phases[i], Samples: 1})
	}
	p := profileOf(stacks...)
	_, boxes := readFlameGraph(t, p)
	if len(boxes) != 1+2*len(names) {
		t.Errorf("%d boxes: %+v", len(boxes), boxes)
	}
	var words []string
	for _, b := range boxes {
		words = append(words, b.Label, b.Title)
		if room := int(b.Rect.Width / flameChar); len([]rune(b.Label)) > room {
			t.Errorf("%q in a box for %d letters", b.Label, room)
		}
	}
	all := strings.Join(words, "\n")
	for _, want := range []string{`a<b>"c'&`, "]]></script>", "größe größe größe", "\uFFFD[31m\uFFFD", "cut \uFFFD\uFFFD", "6kernel5error&<T as core::fmt::Debug>::fmt: 1 samples", "6kernel5erro.."} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in\n%s", want, all)
		}
	}
	// In folded output, a line is a stack.
	p.Stacks = []ProfileStack{{Program: "a;b\nc", Frames: []string{"f"}, Samples: 1}}
	if got := p.Folded(); got != "a:b c;f 1\n" {
		t.Errorf("folded %q", got)
	}
}

// TestFlameGraphCounts: the script computes with samples. A box contains all samples of the boxes above it.
// Without samples there is a picture, too.
func TestFlameGraphCounts(t *testing.T) {
	var stacks []ProfileStack
	for i, leaf := range []string{"a", "b", "c"} {
		stacks = append(stacks, ProfileStack{Program: "p", Frames: []string{leaf, "caller"}, Phase: phases[i], Samples: 1})
	}
	_, boxes := readFlameGraph(t, profileOf(append(stacks, ProfileStack{Program: "q", Phase: phaseUser, Samples: 2997})...))
	want := []flameBox{{Name: "all", Samples: 3000}, {Name: "p", Samples: 3}, {Name: "caller", Samples: 3},
		{Name: "a", Samples: 1}, {Name: "b", Start: 1, Samples: 1}, {Name: "c", Start: 2, Samples: 1}, {Name: "q", Start: 3, Samples: 2997}}
	for i, w := range want {
		if i >= len(boxes) || boxes[i].Name != w.Name || boxes[i].Start != w.Start || boxes[i].Samples != w.Samples {
			t.Fatalf("box %d is not %+v: %+v", i, w, boxes)
		}
	}
	if _, boxes := readFlameGraph(t, profileOf()); len(boxes) != 1 || boxes[0].Title != "all: 0 samples, 0.00 %" {
		t.Errorf("nothing sampled: %+v", boxes)
	}
}
