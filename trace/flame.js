(function () {
  "use strict";
  var boxes = Array.prototype.map.call(document.querySelectorAll("g.f"), function (g) {
    var r = g.querySelector("rect");
    return { // x and s are counts of samples: exact at every zoom
      g: g, rect: r, text: g.querySelector("text"), title: g.querySelector("title").textContent, name: g.getAttribute("data-n"),
      x: +g.getAttribute("data-x"), s: +g.getAttribute("data-s"), y: +r.getAttribute("y"), fill: r.getAttribute("fill")
    };
  });
  var all = boxes[0], frames = all.g.parentNode;
  var left = +all.rect.getAttribute("x"), width = +frames.getAttribute("data-width"), charWidth = +frames.getAttribute("data-char");
  var details = document.getElementById("details"), plain = details.textContent + "; click a box to zoom";
  var reset = document.getElementById("reset"), search = document.getElementById("search");
  var last = "", status = plain; // the pattern of the last search, and what is said while no box is pointed at

  function cut(s, room) {
    var fit = Math.floor(room / charWidth), letters = s.length > fit ? Array.from(s) : s;
    return fit < 3 ? "" : letters.length > fit ? letters.slice(0, fit - 2).join("") + ".." : s;
  }

  function say(s) { details.textContent = cut(s, width); }

  function place(b, x, w, faded) {
    b.g.style.display = w < 0.2 ? "none" : "";
    if (w < 0.2) { return; }
    b.g.style.opacity = faded ? 0.45 : 1;
    b.rect.setAttribute("x", x);
    b.rect.setAttribute("width", w - Math.min(0.5, w / 4));
    b.text.setAttribute("x", x + 3);
    b.text.textContent = cut(b.name, w - 4);
  }

  function zoom(to) {
    var scale = width / (to.s || 1);
    boxes.forEach(function (b) {
      if (b.y > to.y) { // callers carry the whole width
        place(b, left, b.x <= to.x && b.x + b.s >= to.x + to.s ? width : 0, true);
      } else {
        var inside = b === to || b.x >= to.x && b.x + b.s <= to.x + to.s;
        place(b, left + (b.x - to.x) * scale, b === to ? width : inside ? b.s * scale : 0, false);
      }
    });
    reset.style.display = to === all ? "none" : "";
  }

  // A box comes before those that stand on it, and after those to its left.
  function find(pattern) {
    var expression = null, found = 0, end = 0;
    try { expression = pattern ? new RegExp(pattern, "i") : null; } catch (e) { say(e.message); return; }
    boxes.forEach(function (b) {
      var hit = expression && expression.test(b.name);
      b.rect.setAttribute("fill", hit ? "#e600e6" : b.fill);
      if (hit && b.x >= end) { found += b.s; end = b.x + b.s; }
    });
    last = pattern;
    status = expression ? pattern + ": " + (100 * found / (all.s || 1)).toFixed(2) + " % of the samples" : plain;
    say(status);
  }

  function ask() {
    var pattern = prompt("Mark functions that match this regular expression (empty: none):", last);
    if (pattern !== null) { find(pattern); }
  }

  function button(b, act) {
    b.addEventListener("click", act);
    b.addEventListener("keydown", function (e) {
      if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); }
    });
  }

  boxes.forEach(function (b) {
    b.g.style.cursor = "pointer";
    b.g.addEventListener("click", function () { zoom(b); });
    b.g.addEventListener("mouseover", function () { say(b.title); });
    b.g.addEventListener("mouseout", function () { say(status); });
  });
  button(reset, function () { zoom(all); });
  button(search, ask);
  search.style.display = ""; // where scripts do not run, nothing offers what they do
  say(plain);
  document.addEventListener("keydown", function (e) {
    var finds = e.key === "f" && (e.ctrlKey || e.metaKey); // the browser's own finds only what was not cut off
    if (e.key === "/" || finds) { e.preventDefault(); ask(); }
    if (e.key === "Escape") { zoom(all); find(""); }
  });
})();
