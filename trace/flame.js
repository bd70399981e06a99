(function () {
  "use strict";
  var frames = Array.prototype.slice.call(document.querySelectorAll("g.f"));
  var boxes = frames.map(function (g) {
    var r = g.querySelector("rect");
    return {
      g: g, rect: r, text: g.querySelector("text"), name: g.getAttribute("data-n"),
      x: +r.getAttribute("x"), w: +r.getAttribute("width"), y: +r.getAttribute("y"), fill: r.getAttribute("fill")
    };
  });
  var left = boxes[0].x, width = boxes[0].w, charWidth = 6.7;
  var details = document.getElementById("details"), plain = details.textContent;
  var reset = document.getElementById("reset"), search = document.getElementById("search");

  function place(b, x, w, faded) {
    b.g.style.display = w < 0.2 ? "none" : "";
    b.g.style.opacity = faded ? 0.45 : 1;
    b.rect.setAttribute("x", x);
    b.rect.setAttribute("width", w);
    b.text.setAttribute("x", x + 3);
    var fit = Math.floor(w / charWidth);
    b.text.textContent = fit < 3 ? "" : b.name.length > fit ? b.name.slice(0, fit - 2) + ".." : b.name;
  }

  function zoom(to) {
    var scale = width / to.w;
    boxes.forEach(function (b) {
      if (b.y > to.y) { // callers carry the whole width
        var holds = b.x <= to.x + 0.01 && b.x + b.w >= to.x + to.w - 0.01;
        place(b, left, holds ? width : 0, true);
        return;
      }
      var inside = b.x >= to.x - 0.01 && b.x + b.w <= to.x + to.w + 0.01;
      place(b, left + (b.x - to.x) * scale, inside ? b.w * scale : 0, false);
    });
    reset.style.display = to === boxes[0] ? "none" : "";
  }

  function find(pattern) {
    var expression = null, share = 0, covered = [];
    try { expression = pattern ? new RegExp(pattern, "i") : null; } catch (e) { details.textContent = e.message; return; }
    boxes.forEach(function (b) {
      var hit = expression && expression.test(b.name);
      b.rect.setAttribute("fill", hit ? "#e600e6" : b.fill);
      if (!hit) { return; }
      var counted = covered.some(function (c) { return b.x >= c.x - 0.01 && b.x + b.w <= c.x + c.w + 0.01; });
      if (!counted) { covered.push(b); share += b.w; }
    });
    details.textContent = expression ? pattern + ": " + (100 * share / width).toFixed(2) + " % of the samples" : plain;
  }

  function ask() {
    var pattern = prompt("Mark functions that match this regular expression (empty: none):", "");
    if (pattern !== null) { find(pattern); }
  }

  boxes.forEach(function (b) {
    b.g.style.cursor = "pointer";
    b.g.addEventListener("click", function () { zoom(b); });
  });
  reset.addEventListener("click", function () { zoom(boxes[0]); });
  search.addEventListener("click", ask);
  document.addEventListener("keydown", function (e) {
    if (e.key === "/") { e.preventDefault(); ask(); }
    if (e.key === "Escape") { zoom(boxes[0]); find(""); }
  });
})();
