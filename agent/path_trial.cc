// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "path_trial.h"

#include "parallel.h"

namespace migr {
namespace {

// Both hosts take the step at the same time: whoever writes finds an end that is connected.
struct TrialOfBoth {
  PathTrial &from, &to;
  wire::TrialStep at_from, at_to;  // what they have answered last

  Status step(const wire::TrialStep& to_from, const wire::TrialStep& to_to) {
    const auto one = [](PathTrial& trial, const wire::TrialStep& request, wire::TrialStep& answer) -> Status {
      auto r = trial.step(request);
      if (!r) return r.error();
      answer = std::move(*r);
      return {};
    };
    const auto s = parallel({[&] { return one(from, to_from, at_from); }, [&] { return one(to, to_to, at_to); }});
    if (s && at_from.ends_size() != at_to.ends_size()) return Error{EPROTO, "the two ends of a path count different paths"};
    return s;
  }
};

}  // namespace

Result<std::vector<PathTried>> try_paths(PathTrial& from, PathTrial& to, std::uint32_t id, const std::vector<PathToTry>& paths) {
  wire::TrialStep at_from, at_to;
  at_from.set_id(id);
  at_to.set_id(id);
  for (const auto& p : paths) {
    for (auto [request, gid] : {std::pair(&at_from, &p.from), std::pair(&at_to, &p.to)}) {
      auto* e = request->add_ends();
      e->set_gid(*gid);
      e->set_mtu(p.mtu);
    }
  }
  TrialOfBoth both{from, to, {}, {}};
  std::vector<PathTried> out(paths.size());
  const auto note = [&]() -> Status {
    if (static_cast<std::size_t>(both.at_from.ends_size()) != out.size()) return Error{EPROTO, "an answer to TryPaths leaves out a path"};
    for (int i = 0; i < both.at_from.ends_size(); i++) {
      auto& tried = out[static_cast<std::size_t>(i)];
      for (const auto* e : {&both.at_from.ends(i), &both.at_to.ends(i)}) {
        if (tried.why_not.empty()) tried.why_not = e->why_not();
        if (tried.error.empty()) tried.error = e->error();
      }
    }
    return {};
  };
  if (auto s = both.step(at_from, at_to); !s) return s.error();
  if (auto s = note(); !s) return s.error();
  const wire::TrialStep made_at_from = both.at_from, made_at_to = both.at_to;
  if (auto s = both.step(made_at_to, made_at_from); !s) return s.error();
  if (auto s = note(); !s) return s.error();
  if (auto s = both.step({}, {}); !s) return s.error();
  if (auto s = note(); !s) return s.error();
  for (auto& tried : out)
    if (!tried.why_not.empty()) tried.error.clear();
  return out;
}

}  // namespace migr
