// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "peer_directory.h"

#include <algorithm>

#include "../limits.h"

namespace migr {
namespace {

// What is learnt is forgotten at once when it has grown to this: it is learnt again.
constexpr std::size_t kMostLearnt = 1 << 16;

template <class Map>
void bound(Map& m) {
  if (m.size() > kMostLearnt) m.clear();
}

}  // namespace

std::vector<std::string> PeerDirectory::others() const {
  std::vector<std::string> out;
  for (const auto& p : peers_.config().peers())
    if (p.name != peers_.config().name) out.push_back(p.name);
  return out;
}

std::string PeerDirectory::error() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& [host, s] : silent_)
    if (peers_.config().peer(host)) out += (out.empty() ? "" : "; ") + s.error.text;
  return out;
}

// Short enough for MIGR_LINKS_TEXT_MAX: of gRPC's text only what comes last, the reason.
std::string PeerDirectory::silence_text(const std::string& host, const grpc::Status& s) const {
  if (s.error_code() == grpc::StatusCode::UNIMPLEMENTED) return host + ": its migrd is of an older release and has no directory of links";
  if (s.error_code() != grpc::StatusCode::UNAVAILABLE && s.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) return from_grpc(s, host).error().text;
  const std::string text = s.error_message();
  const auto colon = text.rfind(": ");
  const auto p = peers_.config().peer(host);
  return host + ": migrd at " + (p ? p->address : "?") + " does not answer (" + (colon == text.npos ? text : text.substr(colon + 2)) + ")";
}

template <class Request, class Reply, class Start>
std::map<std::string, Result<Reply>> PeerDirectory::ask(const std::map<std::string, Request>& requests, Start start) {
  struct Call {
    std::string host;
    std::unique_ptr<wire::Links::Stub> stub;
    grpc::ClientContext ctx;
    Reply reply;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<Reply>> reader;
  };
  std::map<std::string, Result<Reply>> out;
  std::vector<std::unique_ptr<Call>> calls;
  grpc::CompletionQueue queue;
  for (const auto& [host, request] : requests) {
    {
      std::lock_guard lock(mutex_);
      if (const auto s = silent_.find(host); s != silent_.end() && Clock::now() < s->second.until) {
        out.emplace(host, s->second.error);
        continue;
      }
    }
    auto channel = peers_.channel(host);
    if (!channel) {
      out.emplace(host, channel.error());
      continue;
    }
    auto c = std::make_unique<Call>();
    c->host = host;
    c->stub = wire::Links::NewStub(*channel);
    set_deadline(c->ctx, kLinkCallMs);
    c->reader = start(*c->stub, c->ctx, request, queue);
    c->reader->Finish(&c->reply, &c->status, c.get());
    calls.push_back(std::move(c));
  }
  for (std::size_t left = calls.size(); left; left--) {
    void* tag = nullptr;
    bool ok = false;
    if (!queue.Next(&tag, &ok)) break;  // each has a deadline
    auto& c = *static_cast<Call*>(tag);
    const Status s = from_grpc(c.status, c.host);
    std::lock_guard lock(mutex_);
    if (s) {
      silent_.erase(c.host);
      out.emplace(c.host, std::move(c.reply));
    } else {
      const Error e{EHOSTUNREACH, silence_text(c.host, c.status)};
      silent_.insert_or_assign(c.host, Silence{Clock::now() + std::chrono::milliseconds(kLinkSilentMs), e});
      out.emplace(c.host, e);
    }
  }
  queue.Shutdown();
  return out;
}

std::vector<LinkDirectory::Answer> PeerDirectory::find_elsewhere(std::span<const VqpName> names) {
  std::map<std::string, wire::LinkLookupRequest> requests;
  std::map<std::string, std::vector<std::size_t>> asked;  // which names
  {
    std::lock_guard lock(mutex_);
    bound(homes_);
    bound(all_asked_);
    bound(where_);
    const auto now = Clock::now();
    const auto all = others();
    std::set<Gid> all_now;
    for (std::size_t i = 0; i < names.size(); i++) {
      const Gid& gid = names[i].gid;
      const auto home = homes_.find(gid);
      auto& last = all_asked_[gid];
      // What was born at a host may live at another.
      const bool everybody = home == homes_.end() || all_now.contains(gid) || now - last > std::chrono::milliseconds(kLinkAskAllMs);
      if (everybody) {
        all_now.insert(gid);
        last = now;
      }
      for (const auto& host : everybody ? all : std::vector<std::string>{home->second}) {
        auto* n = requests[host].add_names();
        n->set_gid(gid.data(), gid.size());
        n->set_vqpn(names[i].vqpn);
        asked[host].push_back(i);
      }
    }
  }
  auto replies = ask<wire::LinkLookupRequest, wire::LinkLookupReply>(
      requests, [](wire::Links::Stub& stub, grpc::ClientContext& ctx, const wire::LinkLookupRequest& r, grpc::CompletionQueue& q) {
        return stub.AsyncLookup(&ctx, r, &q);
      });

  std::vector<Answer> out(names.size());
  std::vector<bool> home_said(names.size());
  std::vector<std::string> silence(names.size());
  std::lock_guard lock(mutex_);
  for (auto& [host, reply] : replies) {
    const auto& which = asked[host];
    const bool whole = reply && static_cast<std::size_t>(reply->found_size()) == which.size();
    for (std::size_t k = 0; k < which.size(); k++) {
      const std::size_t i = which[k];
      if (!whole) {
        silence[i] += (silence[i].empty() ? "" : "; ") + (reply ? host + ": an answer that does not fit" : reply.error().text);
        continue;
      }
      auto& f = *reply->mutable_found(static_cast<int>(k));
      if (f.home()) {
        homes_[names[i].gid] = host;
        home_said[i] = true;
      }
      if (!f.has_vqp() || (!out[i].status && !f.home())) continue;  // who was born there is known best there
      if (auto who = instance_of(f.process().instance())) where_[*who] = host;
      out[i].status = 0;
      out[i].found = std::move(f);
    }
  }
  for (std::size_t i = 0; i < names.size(); i++) {
    if (!out[i].status || home_said[i] || table_.home(names[i].gid)) continue;  // EAGAIN: who has the GID does not know it yet
    if (!silence[i].empty()) {
      out[i].status = EHOSTUNREACH;
      out[i].text = silence[i];
    } else if (!homes_.contains(names[i].gid)) {
      out[i].status = ENOENT;
      out[i].text = "no host has GID " + text_of(names[i].gid) + "; is the partner's host among the peers in migrd's configuration?";
    } else {
      homes_.erase(names[i].gid);  // it had it: everybody is asked the next time
    }
  }
  return out;
}

std::vector<LinkDirectory::End> PeerDirectory::meet_elsewhere(std::span<const wire::LinkChannel> ends) {
  std::vector<End> out(ends.size());
  std::vector<std::size_t> left(ends.size());
  for (std::size_t i = 0; i < ends.size(); i++) left[i] = i;
  const auto all = others();
  // First where it was last, then everywhere.
  for (const bool everybody : {false, true}) {
    std::map<std::string, wire::LinkChannelRequest> requests;
    std::map<std::string, std::vector<std::size_t>> asked;
    {
      std::lock_guard lock(mutex_);
      for (const std::size_t i : left) {
        const auto who = instance_of(ends[i].peer());
        const auto at = where_.find(*who);
        if (!everybody && at == where_.end()) continue;
        for (const auto& host : everybody ? all : std::vector<std::string>{at->second}) {
          *requests[host].add_ends() = ends[i];
          asked[host].push_back(i);
        }
      }
    }
    auto replies = ask<wire::LinkChannelRequest, wire::LinkChannelReply>(
        requests, [](wire::Links::Stub& stub, grpc::ClientContext& ctx, const wire::LinkChannelRequest& r, grpc::CompletionQueue& q) {
          return stub.AsyncChannel(&ctx, r, &q);
        });
    std::vector<bool> here(ends.size());
    std::vector<std::string> silence(ends.size());
    std::lock_guard lock(mutex_);
    for (auto& [host, reply] : replies) {
      const auto& which = asked[host];
      const bool whole = reply && static_cast<std::size_t>(reply->answers_size()) == which.size();
      for (std::size_t k = 0; k < which.size(); k++) {
        const std::size_t i = which[k];
        if (!whole) {
          silence[i] += (silence[i].empty() ? "" : "; ") + (reply ? host + ": an answer that does not fit" : reply.error().text);
          continue;
        }
        const auto& a = reply->answers(static_cast<int>(k));
        if (a.known() == wire::LinkChannelAnswer::NOT_HERE) continue;
        where_[*instance_of(ends[i].peer())] = host;
        here[i] = true;
        out[i].status = 0;
        out[i].answer = a;
      }
    }
    std::erase_if(left, [&](std::size_t i) {
      if (here[i]) return true;
      out[i].status = silence[i].empty() ? ENOENT : EHOSTUNREACH;
      out[i].text = silence[i].empty() ? "no host has the process at the other end of a channel: it has ended, or runs without migrd" : silence[i];
      return false;
    });
    if (left.empty()) break;
  }
  return out;
}

grpc::Status LinksService::Lookup(grpc::ServerContext*, const wire::LinkLookupRequest* r, wire::LinkLookupReply* out) {
  if (r->names_size() > MIGR_LINKS_MAX_RECORDS) return {grpc::StatusCode::INVALID_ARGUMENT, "too many names"};
  for (const auto& n : r->names()) {
    const auto gid = gid_of(n.gid());
    *out->add_found() = gid ? table_.find({*gid, n.vqpn()}) : wire::LinkFound();
  }
  return grpc::Status::OK;
}

grpc::Status LinksService::Channel(grpc::ServerContext*, const wire::LinkChannelRequest* r, wire::LinkChannelReply* out) {
  if (r->ends_size() > MIGR_LINKS_MAX_RECORDS) return {grpc::StatusCode::INVALID_ARGUMENT, "too many channels"};
  for (const auto& e : r->ends()) *out->add_answers() = table_.answer(e);
  return grpc::Status::OK;
}

}  // namespace migr
