// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "redis_directory.h"

#include <hiredis/hiredis.h>
#include <spdlog/spdlog.h>

#include <fstream>

#include "../hex.h"
#include "../limits.h"

namespace migr {
namespace {

constexpr std::size_t kPipeline = 256;  // commands in one go
constexpr int kListenS = 1;             // how long the server is waited for to have something to tell
constexpr const char* kKnocksKept = "1000";

// Only if it is still ours: a process that has moved is told of by another host.
constexpr char kDeleteOwnProcess[] = "if redis.call('hget',KEYS[1],'h')==ARGV[1] then return redis.call('del',KEYS[1]) end return 0";
constexpr char kDeleteOwnName[] =
    "local host=redis.call('hget',KEYS[2],'h') "
    "if redis.call('get',KEYS[1])==ARGV[1] and (not host or host==ARGV[2]) then return redis.call('del',KEYS[1]) end return 0";

// Longer than a server is told to keep us waiting.
timeval limit() {
  const int ms = std::max(kLinkCallMs, 2'000 * kListenS);
  return {ms / 1000, ms % 1000 * 1000};
}

template <std::size_t N>
std::string hexed(const std::array<std::uint8_t, N>& bytes) {
  return to_hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

std::string text_name(const VqpName& n) { return hexed(n.gid) + ":" + std::to_string(n.vqpn); }
std::string channel_field(const Instance& peer, std::uint32_t link) { return "c" + hexed(peer) + ":" + std::to_string(link); }

RedisConnection::Value value_of(const redisReply& r) {
  RedisConnection::Value v;
  switch (r.type) {
    case REDIS_REPLY_STRING:
    case REDIS_REPLY_STATUS:
    case REDIS_REPLY_ERROR:
      v.kind = v.kText;
      v.text.assign(r.str, static_cast<std::size_t>(r.len));
      break;
    case REDIS_REPLY_INTEGER:
      v.kind = v.kNumber;
      v.number = r.integer;
      break;
    case REDIS_REPLY_ARRAY:
      v.kind = v.kList;
      for (std::size_t i = 0; i < r.elements; i++) v.list.push_back(value_of(*r.element[i]));
      break;
    default: break;
  }
  return v;
}

}  // namespace

void RedisConnection::Free::operator()(redisContext* c) const { redisFree(c); }

Error RedisConnection::fail(const std::string& what) {
  context_.reset();
  return Error{EHOSTUNREACH, "redis at " + config_.address + ": " + what};
}

Status RedisConnection::connect() {
  if (context_) return {};
  const std::string& a = config_.address;
  if (a.starts_with('/')) {
    context_.reset(redisConnectUnixWithTimeout(a.c_str(), limit()));
  } else {
    const auto colon = a.rfind(':');
    std::string host = a.substr(0, colon);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    context_.reset(redisConnectWithTimeout(host.c_str(), std::atoi(a.c_str() + colon + 1), limit()));
  }
  if (!context_) return fail("out of memory");
  if (context_->err) return fail(std::string("cannot connect: ") + context_->errstr);
  redisSetTimeout(context_.get(), limit());
  if (config_.password_file.empty()) return {};
  std::ifstream in(config_.password_file);
  std::string password;
  if (!std::getline(in, password) || password.empty()) return fail("no password in " + config_.password_file);
  auto r = run({{"AUTH", password}});
  return r;
}

Result<std::vector<RedisConnection::Value>> RedisConnection::run(const std::vector<Command>& commands) {
  std::vector<Value> out;
  if (auto s = connect(); !s) return s.error();
  for (const auto& c : commands) {
    std::vector<const char*> argv;
    std::vector<std::size_t> lengths;
    for (const auto& word : c) argv.push_back(word.data()), lengths.push_back(word.size());
    if (redisAppendCommandArgv(context_.get(), static_cast<int>(argv.size()), argv.data(), lengths.data()) != REDIS_OK) return fail(context_->errstr);
  }
  for (const auto& c : commands) {
    void* raw = nullptr;
    if (redisGetReply(context_.get(), &raw) != REDIS_OK) {
      const bool late = context_->err == REDIS_ERR_IO && (errno == EAGAIN || errno == EWOULDBLOCK);
      return fail(c[0] + ": " + (late ? "no answer within " + std::to_string(kLinkCallMs) + " ms" : std::string(context_->errstr)));
    }
    const std::unique_ptr<redisReply, void (*)(void*)> reply(static_cast<redisReply*>(raw), freeReplyObject);
    out.push_back(value_of(*reply));
    if (reply->type == REDIS_REPLY_ERROR) return fail(c[0] + ": " + out.back().text);
  }
  return out;
}

RedisDirectory::RedisDirectory(const RedisConfig& config, std::string host, LinkTable& table, LinkTable::Gids gids, LinkTable::Knock knock)
    : RedisDirectory(config, std::move(host), table, std::move(gids), std::move(knock), Times()) {}

RedisDirectory::RedisDirectory(const RedisConfig& config, std::string host, LinkTable& table, LinkTable::Gids gids, LinkTable::Knock knock, Times times)
    : LinkDirectory(table), config_(config), host_(std::move(host)), gids_(std::move(gids)), knock_(std::move(knock)), times_(times),
      asker_(config_), writer_(config_), listener_(config_) {}

RedisDirectory::~RedisDirectory() { stop(); }

void RedisDirectory::start() {
  write_thread_ = std::thread([this] { write(); });
  listen_thread_ = std::thread([this] { listen(); });
}

void RedisDirectory::stop() {
  if (!write_thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  write_thread_.join();
  listen_thread_.join();
  if (!error().empty()) return;
  std::vector<Command> commands;
  for (const auto& who : table_.everything().processes) commands.push_back({"EVAL", kDeleteOwnProcess, "1", key("p:", hexed(who)), host_});
  if (!commands.empty()) (void)writer_.run(commands);
}

std::string RedisDirectory::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void RedisDirectory::note(const Status& s) {
  std::lock_guard lock(mutex_);
  const std::string now = s ? "" : s.error().text;
  if (now == error_) return;
  error_ = now;
  if (s)
    spdlog::info("{} answers", name());
  else
    spdlog::error("{}; no new backup is found until it answers", now);
}

void RedisDirectory::process_changed(const Instance& who) {
  const bool here = table_.here(who);
  std::lock_guard lock(mutex_);
  (here ? dirty_.processes : dirty_.left).insert(who);
  changed_.notify_all();
}

void RedisDirectory::vqp_changed(const Instance& who, const VqpName& vqp) {
  std::lock_guard lock(mutex_);
  if (dirty_.vqps.size() < kMaxLinkVqps)
    dirty_.vqps.insert({who, vqp});
  else
    too_many_ = true;  // a server that is away for long; what is then is written when it is back
  changed_.notify_all();
}

void RedisDirectory::channel_changed(const Instance& who, const Instance& peer, std::uint32_t link) {
  std::lock_guard lock(mutex_);
  dirty_.channels.insert({who, peer, link});
  changed_.notify_all();
}

void RedisDirectory::dirty_all() {
  const auto all = table_.everything();
  std::lock_guard lock(mutex_);
  dirty_.processes.insert(all.processes.begin(), all.processes.end());
  dirty_.vqps.insert(all.vqps.begin(), all.vqps.end());
  for (const auto& c : all.channels) dirty_.channels.insert({c.who, c.peer, c.link});
}

// Takes out of `dirty` what has been written.
Status RedisDirectory::write_some(Dirty& dirty) {
  std::vector<Command> commands;
  std::set<Instance> touched;
  auto flush = [&]() -> Status {
    for (const auto& who : touched) commands.push_back({"EXPIRE", key("p:", hexed(who)), seconds(times_.expiry)});
    if (commands.empty()) return {};
    auto r = writer_.run(commands);
    commands.clear();
    touched.clear();
    return r;
  };
  for (const auto& who : dirty.left) commands.push_back({"EVAL", kDeleteOwnProcess, "1", key("p:", hexed(who)), host_});
  for (const auto& who : dirty.processes) {
    const auto p = table_.process(who);
    if (!p) continue;
    commands.push_back({"HSET", key("p:", hexed(who)), "h", host_, "l", p->SerializeAsString()});
    touched.insert(who);
    if (commands.size() < kPipeline) continue;
    if (auto s = flush(); !s) return s;
  }
  for (const auto& [who, vqp] : dirty.vqps) {
    const std::string k = key("p:", hexed(who)), n = key("n:", text_name(vqp));
    if (const auto v = table_.vqp(who, vqp)) {
      commands.push_back({"HSET", k, "v" + text_name(vqp), v->SerializeAsString()});
      commands.push_back({"SET", n, hexed(who), "EX", seconds(times_.names)});
      touched.insert(who);
    } else {
      if (table_.here(who)) commands.push_back({"HDEL", k, "v" + text_name(vqp)});
      commands.push_back({"EVAL", kDeleteOwnName, "2", n, k, hexed(who), host_});
    }
    if (commands.size() < kPipeline) continue;
    if (auto s = flush(); !s) return s;
  }
  for (const auto& [who, peer, link] : dirty.channels) {
    const std::string k = key("p:", hexed(who));
    if (const auto c = table_.channel(who, peer, link)) {
      commands.push_back({"HSET", k, channel_field(peer, link), c->SerializeAsString()});
      touched.insert(who);
    } else if (table_.here(who)) {
      commands.push_back({"HDEL", k, channel_field(peer, link)});
    }
    if (commands.size() < kPipeline) continue;
    if (auto s = flush(); !s) return s;
  }
  if (auto s = flush(); !s) return s;
  dirty = {};
  return {};
}

// What has vanished there meanwhile is written again.
Status RedisDirectory::refresh() {
  std::vector<Command> commands;
  const auto all = table_.everything();
  for (const auto& who : all.processes) commands.push_back({"EXPIRE", key("p:", hexed(who)), seconds(times_.expiry)});
  for (const auto& gid : gids_ ? gids_() : std::set<Gid>()) commands.push_back({"SET", key("g:", hexed(gid)), host_, "EX", seconds(times_.expiry)});
  for (const auto& who : all.processes)
    if (const auto p = table_.process(who))
      for (const auto& gid : p->gids())
        if (gid_of(gid)) commands.push_back({"SET", key("g:", to_hex(gid)), host_, "EX", seconds(times_.expiry)});
  if (commands.empty()) commands.push_back({"PING"});
  auto r = writer_.run(commands);
  if (!r) return r;
  bool lost = false;
  for (std::size_t i = 0; i < all.processes.size(); i++) lost |= !(*r)[i].number && table_.here(all.processes[i]);
  if (lost) dirty_all();
  return {};
}

void RedisDirectory::write() {
  Clock::time_point refreshed{}, names_written = Clock::now();
  Dirty doing;
  bool failed = false;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const auto wait = failed ? times_.again : times_.refresh;
    if (failed)
      changed_.wait_for(lock, wait, [this] { return stop_; });
    else
      changed_.wait_until(lock, refreshed + wait, [this] { return stop_ || !dirty_.empty(); });
    if (stop_) break;
    doing.left.merge(dirty_.left);
    doing.processes.merge(dirty_.processes);
    if (doing.vqps.size() < kMaxLinkVqps)
      doing.vqps.merge(dirty_.vqps);
    else if (!dirty_.vqps.empty())
      too_many_ = true;
    doing.channels.merge(dirty_.channels);
    dirty_ = {};
    lock.unlock();
    Status s = write_some(doing);
    if (s && (failed || Clock::now() - refreshed >= times_.refresh)) {
      s = refresh();
      if (s) refreshed = Clock::now();
      // Names expire late, and are written again long before.
      if (s && Clock::now() - names_written >= times_.names / 3) dirty_all(), names_written = Clock::now();
    }
    note(s);
    failed = !s;
    lock.lock();
    if (s && std::exchange(too_many_, false)) {
      lock.unlock();
      dirty_all();
      lock.lock();
    }
  }
}

void RedisDirectory::listen() {
  const std::string list = key("k:", host_);
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    auto r = listener_.run({{"BLPOP", list, std::to_string(kListenS)}});
    if (!r) {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, times_.again, [this] { return stop_; })) return;
      continue;
    }
    const Value& v = (*r)[0];
    wire::LinkChannel told;
    if (v.kind != Value::kList || v.list.size() != 2 || !told.ParseFromString(v.list[1].text)) continue;
    const auto end = from_wire(told);
    const auto to = instance_of(told.peer());
    if (end && to && knock_) knock_(*to, *end);
  }
}

Result<std::vector<RedisConnection::Value>> RedisDirectory::ask(const std::vector<Command>& commands) {
  std::lock_guard lock(asking_);
  if (Clock::now() < silent_until_) return silence_;
  auto r = asker_.run(commands);
  if (!r) {
    silence_ = r.error();
    silent_until_ = Clock::now() + std::chrono::milliseconds(kLinkSilentMs);
  }
  return r;
}

std::vector<LinkDirectory::Answer> RedisDirectory::find_elsewhere(std::span<const VqpName> names) {
  std::vector<Answer> out(names.size());
  auto unreachable = [&](const Error& e) {
    for (auto& a : out) a = {EHOSTUNREACH, e.text, {}};
    return out;
  };
  std::vector<Command> commands;
  for (const auto& n : names) commands.push_back({"GET", key("n:", text_name(n))});
  for (const auto& n : names) commands.push_back({"GET", key("g:", hexed(n.gid))});
  auto r = ask(commands);
  if (!r) return unreachable(r.error());
  commands.clear();
  for (std::size_t i = 0; i < names.size(); i++) commands.push_back({"HMGET", key("p:", (*r)[i].text), "l", "v" + text_name(names[i])});
  auto details = ask(commands);
  if (!details) return unreachable(details.error());
  for (std::size_t i = 0; i < names.size(); i++) {
    const Value& d = (*details)[i];
    wire::LinkFound f;
    if (d.kind == Value::kList && d.list.size() == 2 && d.list[0].kind == Value::kText && d.list[1].kind == Value::kText &&
        f.mutable_process()->ParseFromString(d.list[0].text) && f.mutable_vqp()->ParseFromString(d.list[1].text)) {
      out[i].status = 0;
      out[i].found = std::move(f);
    } else if ((*r)[names.size() + i].kind == Value::kNone && !table_.home(names[i].gid)) {
      out[i].status = ENOENT;
      out[i].text = "no host has told " + name() + " of GID " + text_of(names[i].gid) + "; does migrd run at the partner's host, with this Redis?";
    }
  }
  return out;
}

std::vector<LinkDirectory::End> RedisDirectory::meet_elsewhere(std::span<const wire::LinkChannel> ends) {
  std::vector<End> out(ends.size());
  auto unreachable = [&](const Error& e) {
    for (auto& a : out) a = {EHOSTUNREACH, e.text, {}};
    return out;
  };
  std::vector<Command> commands;
  for (const auto& e : ends)
    commands.push_back({"HMGET", key("p:", to_hex(e.peer())), "h", channel_field(*instance_of(e.instance()), e.link())});
  auto r = ask(commands);
  if (!r) return unreachable(r.error());
  commands.clear();
  std::set<std::string> lists;
  for (std::size_t i = 0; i < ends.size(); i++) {
    const Value& v = (*r)[i];
    if (v.kind != Value::kList || v.list.size() != 2 || v.list[0].kind != Value::kText) {
      out[i].status = ENOENT;
      out[i].text = name() + " does not know the process at the other end of a channel: it has ended, or runs without migrd";
      continue;
    }
    out[i].status = 0;
    auto& a = out[i].answer;
    if (v.list[1].kind == Value::kText && a.mutable_end()->ParseFromString(v.list[1].text) && a.end().round() >= ends[i].round()) {
      a.set_known(a.end().round() == ends[i].round() ? wire::LinkChannelAnswer::HERE : wire::LinkChannelAnswer::AHEAD);
      continue;
    }
    a.set_known(wire::LinkChannelAnswer::NOT_YET);
    const std::string list = key("k:", v.list[0].text);
    commands.push_back({"RPUSH", list, ends[i].SerializeAsString()});
    if (!lists.insert(list).second) continue;
    commands.push_back({"LTRIM", list, std::string("-") + kKnocksKept, "-1"});
    commands.push_back({"EXPIRE", list, seconds(times_.expiry)});
  }
  if (!commands.empty())
    if (auto told = ask(commands); !told) return unreachable(told.error());
  return out;
}

}  // namespace migr
