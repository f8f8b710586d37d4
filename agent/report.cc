// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "history.h"
#include "limits.h"
#include "text.h"

namespace migr {
namespace {

constexpr int kWidth = 960, kLabel = 170, kRight = 90, kRow = 20, kTop = 30, kPlot = 120;  // px
constexpr char kReceived[] = "#4a7fb5", kSent[] = "#c0504d";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  return out;
}

std::string row(const std::string& name, const std::string& value) { return "<tr><th>" + name + "</th><td>" + value + "</td></tr>\n"; }
std::string ms(double n) { return fmt::format("{:.1f} ms", n); }
std::string mb(double bytes) { return fmt::format("{:.1f} MB", bytes / 1e6); }

struct Bar {
  std::string name;
  double start = 0, ms = 0;
};

// Phases in their order, after each its parts: those are called PHASE.PART.
std::vector<Bar> bars_of(const Json& timeline) {
  std::vector<Bar> all, out;
  for (const auto& e : timeline) all.push_back({e["name"], e["start_ms"], e["ms"]});
  for (const auto& phase : all) {
    if (phase.name.find('.') != std::string::npos) continue;
    out.push_back(phase);
    for (const auto& part : all)
      if (part.name.starts_with(phase.name + ".")) out.push_back(part);
  }
  return out;
}

// Round, and at most ten of them.
double tick(double span) {
  for (double ten = 1;; ten *= 10)
    for (const double t : {ten, 2 * ten, 5 * ten})
      if (span / t <= 10) return t;
}

// The time since a migration began, from left to right: the same for all pictures of a page.
struct TimeAxis {
  double span = 1;  // ms
  double x(double at) const { return kLabel + std::clamp(at / span, 0.0, 1.0) * (kWidth - kLabel - kRight); }
  /// Of a picture `height` high: its begin, and a line every so often.
  std::string open(int height) const {
    std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n", kWidth, height);
    for (double at = 0; at <= span; at += tick(span))
      out += fmt::format("<path d=\"M{0:.1f},{1} V{2}\" stroke=\"#ddd\"/><text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4:g} s</text>\n", x(at), kTop - 8, height - 10,
                         kTop - 14, at / 1e3);
    return out;
  }
};

// Each sample goes from the end of the one before to its own. Of a long migration, what was before the first one is not kept: that
// one is as long as the second, or as one is when nothing happens.
std::string steps(const TimeAxis& axis, const Json& at, const Json& values, double most, const char* colour) {
  std::string path;
  const double length = std::max<double>(kTrafficIdlePeriodMs, at.size() > 1 ? at[1].get<double>() - at[0].get<double>() : 0);
  const double first = at.empty() ? 0 : std::max(0.0, at[0].get<double>() - length);
  for (std::size_t i = 0; i < at.size(); i++)
    path += fmt::format("{}{:.1f},{:.1f} H{:.1f}", i ? " L" : "M", axis.x(i ? at[i - 1].get<double>() : first), kTop + kPlot * (1 - values[i].get<double>() / most), axis.x(at[i]));
  return fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"/>\n", path, colour);
}

std::string traffic_svg(const TimeAxis& axis, const Json& timeline, const Json& traffic) {
  double most = 0, from = -1, to = -1;
  for (const auto* column : {"rx_mbps", "tx_mbps"})
    for (const auto& v : traffic[column]) most = std::max(most, v.get<double>());
  most = most > 0 ? std::ceil(most / tick(most)) * tick(most) : 1;
  for (const auto& e : timeline) {
    if (e["name"] == "suspend") from = e["start_ms"];
    if (e["name"] == "resume") to = e["start_ms"].get<double>() + e["ms"].get<double>();
  }
  std::string out = axis.open(kTop + kPlot + 10);
  if (from >= 0 && to > from) out += fmt::format("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"#eee\"/>\n", axis.x(from), kTop, axis.x(to) - axis.x(from), kPlot);
  for (const double v : {0.0, most})
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g} Mbit/s</text>\n", kLabel - 8, kTop + kPlot * (1 - v / most) + 4, v);
  out += steps(axis, traffic["at_ms"], traffic["rx_mbps"], most, kReceived) + steps(axis, traffic["at_ms"], traffic["tx_mbps"], most, kSent);
  out += fmt::format("<text x=\"{0}\" y=\"{1}\" fill=\"{2}\">received</text><text x=\"{0}\" y=\"{3}\" fill=\"{4}\">sent</text>\n", kWidth - kRight + 8, kTop + 12, kReceived, kTop + 28, kSent);
  return out + "</svg>\n";
}

std::string phases_svg(const TimeAxis& axis, const std::vector<Bar>& bars) {
  std::string out = axis.open(kTop + kRow * static_cast<int>(bars.size()) + 10);
  int y = kTop;
  for (const auto& b : bars) {
    const bool part = b.name.find('.') != std::string::npos, stop = b.name == "rollback";
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>", kLabel - 8, y + kRow - 6, escaped(b.name));
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>", axis.x(b.start), part ? y + 6 : y + 3, std::max(axis.x(b.start + b.ms) - axis.x(b.start), 1.0),
                       part ? kRow - 12 : kRow - 6, stop ? "#c0504d" : part ? "#a9c4de" : "#4a7fb5");
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", std::max(axis.x(b.start + b.ms), axis.x(b.start) + 1) + 4, y + kRow - 6, ms(b.ms));
    y += kRow;
  }
  return out + "</svg>\n";
}

}  // namespace

std::string report_html(const Json& s) {
  const auto text = [&](const char* key) { return escaped(s[key].get<std::string>()); };
  const auto number = [&](const char* key) { return s[key].get<double>(); };
  const std::string title = fmt::format("{}: {} &rarr; {}, {}", text("container"), text("from"), text("to"), outcome_of(s));
  std::string out = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>" + title +
                    "</title>\n<style>body{font-family:sans-serif;max-width:62em;margin:2em auto;padding:0 1em}th{text-align:left;font-weight:normal;color:#555;"
                    "padding-right:2em}td,th{padding:2px 1em 2px 0;vertical-align:top}svg{width:100%}</style></head><body>\n<h1>" +
                    title + "</h1>\n<table>\n";
  out += row("migration", migration_name(s)) + row("began", escaped(local_time(s["begun_ms"].get<std::int64_t>() / 1000)));
  if (s["rollback_reason"].is_string()) out += row("because", text("rollback_reason"));
  std::string back;
  for (const auto& what : s.value("rolled_back", Json::array())) back += (back.empty() ? "" : ", ") + escaped(what);
  if (!back.empty()) out += row("rolled back", back);
  out += row("service blackout", ms(number("service_blackout_ms"))) + row("communication blackout of the partner", ms(number("communication_blackout_ms"))) + row("copied", mb(number("bytes_copied")));
  const auto bars = bars_of(s["timeline"]);
  TimeAxis axis;
  for (const auto& b : bars) axis.span = std::max(axis.span, b.start + b.ms);
  out += "</table>\n<h2>Phases</h2>\n" + phases_svg(axis, bars) + "<h2>Partners</h2>\n";
  if (s["partner_figures"].empty()) out += "<p>Nothing was recorded of partners.</p>\n";
  else out += "<table>\n<tr><th>host</th><th>blackout</th><th>suspended</th><th>sends posted again</th><th>receives posted again</th></tr>\n";
  for (const auto& p : s["partner_figures"])
    out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n", escaped(p["host"]), ms(p["blackout_ms"]), ms(p["suspended_ms"]),
                       p["replayed_sends"].get<std::uint64_t>(), p["replayed_recvs"].get<std::uint64_t>());
  if (!s["partner_figures"].empty()) out += "</table>\n";
  for (const auto& p : s["partner_figures"])
    if (const auto t = p.value("traffic", Json()); !t.is_null() && !t["at_ms"].empty())
      out += "<h3>What all RDMA ports of " + escaped(p["host"]) + " carried</h3>\n" + traffic_svg(axis, s["timeline"], t);
  return out + "<details><summary>Everything that was recorded</summary><pre>" + escaped(s.dump(2, ' ', false, Json::error_handler_t::replace)) + "</pre></details>\n</body></html>\n";
}

}  // namespace migr
