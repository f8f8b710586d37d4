// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "options.h"

#include <getopt.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <utility>

namespace verify {
namespace {

constexpr const char kHelp[] =
    R"(migr_verify: RDMA traffic between two ends that check every completion and every byte

  migr_verify [options]            serves one client, then ends
  migr_verify [options] SERVER     is the client; its --mode, --transport, --lossless, --qps, --size, --depth,
                                   --iterations, --rate and --seed count

  --mode M          send send_imm write write_imm read atomic inline unsignalled sg mixed (mixed)
  --transport T     rc uc (rc); what uc loses is counted, and no fault
  --lossless        of uc, too, WRITEs and memory are compared where no message was lost: nothing gets lost on the way
  --qps N           1..4096 (1)            --size BYTES     largest message, 16..1048576 (4096)
  --depth N         WRs in flight per QP, 4..512 (16)
  --seed N          of content and order (1)
  --seconds S       the time to run; --iterations N: the WRs of each QP; neither: until stopped
  --rate N          WRs per second of each end, all QPs together (as many as can be); it then sleeps in between
  --retries N       of a packet that is not acknowledged, 1.07 s apart (7, which soft-RoCE takes for as many as there need be)
  --events          sleep on a completion channel instead of polling
  --cq-ex           poll with ibv_start_poll, ibv_next_poll and the readers of ibv_create_cq_ex
  --wr-api          post with ibv_wr_*; ends with status 4 if the device has it not
  --atomic-write    acknowledge by ibv_wr_atomic_write (RC, with --wr-api); ends with status 4 if the device knows none
  --rnr             post fewer receives than the partner needs (it has to try again)
  --mr MB           register so much more memory, that nobody ever writes to (0); it is looked at in the end
  --mr-fill MB      of which so many are filled at the start, and not with zeros (0)
  --mr-parts N      and N parts of it once more, each by itself (0)
  --memory K[,K..]  of the registered regions (local, receive, target, read, words, --mr) in turn: private,
                    thp, hugetlb, shared, memfd (private)
  --churn MS        make and destroy a PD, MR, CQ and QP every so often beside the traffic
  --srq             all QPs of this end receive from one SRQ, whose limit event has to come
  --no-limit        which has no limit
  --any-order       and may use its receives in another order than they were posted in
  --resize          resize the CQs (and the SRQ) of this end at the start, under traffic
  --iova            register what the partner reads and writes with ibv_reg_mr_iova, at other addresses, from zero; all of it with relaxed ordering
  --fork            have a child that was forked after the set-up and keeps what it inherited
  --fork-later      the same, forked when SIGUSR1 comes
  --windows         let the partner write through memory windows: type 2 of each QP, type 1 for every other
  --invalidate      the partner invalidates a further window of type 2 by SEND_WITH_INV again and again, which is bound anew,
                    invalidated by this end (LOCAL_INV) and bound once more; every other QP, RC without --wr-api
  --second          keep another context open, with a QP of its own that has to work at the end
  --rereg K[,K..]   change access, pd, translation of what the partner writes to and reads by ibv_rereg_mr, when it knows the keys
  --hold KIND       have an object of this kind beside the traffic: cm (of librdmacm, opened past libmigr), sqd (a QP in
                    that state), readonly (registered memory that it may not write to any more)
  --query           ibv_query_device, _port and _qp must say at the end what they said at the start
  --dev NAME        RDMA device           --ib-port N      its port (1)
  --gid-index N     (the RoCE v2 one with an IPv4 address)
  --port N          TCP, for the exchange (18525)          --bind ADDRESS   own TCP address
  --connect S       wait so long for the partner (30)
  --stall S         so long without any progress is an error (120)
  --stop-file FILE  ends the run, cleanly, when FILE comes to be; so does SIGTERM
  --rest-file FILE  while FILE is there this end begins nothing new
  --rts-file FILE   (client) QPs stay in RTR, where they only answer, until FILE comes to be
  --close-file FILE (client) when FILE comes to be both ends check their memory and close all of RDMA; the memory
                    and the TCP connection stay, until the stop
  --samples FILE    bytes per 10 ms, "EPOCH_MS BYTES" per line, written at the end
  --status FILE     rewritten every half second while running: one JSON line
  --json FILE       the closing JSON line goes there too

Both ends close with one JSON line on stdout. Status: 0 all is well at both ends, 1 something was lost, duplicated,
reordered or corrupted, or the connection broke, 2 bad command line, 3 cannot set up, 4 not supported by this device.
)";

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "migr_verify: %s (see migr_verify --help)\n", why.c_str());
  std::exit(kExitUsage);
}

std::uint64_t number(const char* option, const char* text, std::uint64_t low, std::uint64_t high) {
  char* end = nullptr;
  errno = 0;
  const std::uint64_t v = std::strtoull(text, &end, 0);
  if (errno || end == text || *end || *text == '-' || v < low || v > high)
    refuse(std::string("--") + option + " " + text + ": want a number from " + std::to_string(low) + " to " +
           std::to_string(high));
  return v;
}

std::vector<MemoryKind> memory_kinds(const std::string& list) {
  static constexpr std::pair<const char*, MemoryKind> kKinds[] = {{"private", MemoryKind::kPrivate}, {"thp", MemoryKind::kThp},
      {"hugetlb", MemoryKind::kHugetlb}, {"shared", MemoryKind::kShared}, {"memfd", MemoryKind::kMemfd}};
  std::vector<MemoryKind> kinds;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    const auto k = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& x) { return name == x.first; });
    if (k == std::end(kKinds)) refuse("--memory " + name + ": want private, thp, hugetlb, shared or memfd");
    kinds.push_back(k->second);
  }
  if (kinds.empty()) refuse("--memory: which?");
  return kinds;
}

Rereg rereg_kinds(const std::string& list) {
  Rereg r;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');)
    if (name == "access") r.access = true;
    else if (name == "pd") r.pd = true;
    else if (name == "translation") r.translation = true;
    else refuse("--rereg " + name + ": want access, pd or translation");
  if (!r.any()) refuse("--rereg: what?");
  return r;
}

double seconds(const char* option, const char* text) {
  char* end = nullptr;
  const double v = std::strtod(text, &end);
  if (end == text || *end || !(v > 0 && v < 1e6)) refuse(std::string("--") + option + " " + text + ": want seconds above 0");
  return v;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  enum {
    kMode = 256, kTransport, kLossless, kQps, kSize, kDepth, kSeed, kSeconds, kIterations, kRate, kRetries, kEvents, kCqEx, kWrApi, kAtomicWrite, kRnr, kMr, kMrFill, kMrParts, kMemory, kChurn, kSrq, kNoLimit, kAnyOrder, kResize, kIova, kWindows, kInvalidate, kRereg, kFork, kForkLater, kSecond, kHold, kQuery, kDev, kIbPort, kGidIndex,
    kPort, kBind, kConnect, kStall, kStopFile, kRestFile, kRtsFile, kCloseFile, kSamples, kStatus, kJson, kHelpOption
  };
  static const option kLong[] = {
      {"transport", 1, nullptr, kTransport}, {"lossless", 0, nullptr, kLossless},
      {"mode", 1, nullptr, kMode},           {"qps", 1, nullptr, kQps},
      {"size", 1, nullptr, kSize},           {"depth", 1, nullptr, kDepth},
      {"seed", 1, nullptr, kSeed},           {"seconds", 1, nullptr, kSeconds},
      {"iterations", 1, nullptr, kIterations}, {"rate", 1, nullptr, kRate},
      {"retries", 1, nullptr, kRetries},
      {"events", 0, nullptr, kEvents},
      {"cq-ex", 0, nullptr, kCqEx},
      {"wr-api", 0, nullptr, kWrApi},        {"rnr", 0, nullptr, kRnr},
      {"atomic-write", 0, nullptr, kAtomicWrite},
      {"srq", 0, nullptr, kSrq},             {"no-limit", 0, nullptr, kNoLimit},
      {"any-order", 0, nullptr, kAnyOrder},
      {"resize", 0, nullptr, kResize},       {"iova", 0, nullptr, kIova},
      {"windows", 0, nullptr, kWindows},     {"invalidate", 0, nullptr, kInvalidate},
      {"rereg", 1, nullptr, kRereg},
      {"fork", 0, nullptr, kFork},
      {"fork-later", 0, nullptr, kForkLater},
      {"second", 0, nullptr, kSecond},       {"hold", 1, nullptr, kHold},
      {"churn", 1, nullptr, kChurn},
      {"mr", 1, nullptr, kMr},               {"mr-parts", 1, nullptr, kMrParts},
      {"mr-fill", 1, nullptr, kMrFill},
      {"rts-file", 1, nullptr, kRtsFile},    {"close-file", 1, nullptr, kCloseFile},
      {"rest-file", 1, nullptr, kRestFile},
      {"memory", 1, nullptr, kMemory},
      {"query", 0, nullptr, kQuery},         {"dev", 1, nullptr, kDev},
      {"ib-port", 1, nullptr, kIbPort},      {"gid-index", 1, nullptr, kGidIndex},
      {"port", 1, nullptr, kPort},           {"bind", 1, nullptr, kBind},
      {"connect", 1, nullptr, kConnect},     {"stall", 1, nullptr, kStall},
      {"stop-file", 1, nullptr, kStopFile},  {"samples", 1, nullptr, kSamples},
      {"status", 1, nullptr, kStatus},       {"json", 1, nullptr, kJson},
      {"help", 0, nullptr, kHelpOption},     {nullptr, 0, nullptr, 0}};
  Options o;
  opterr = 0;
  int index = 0;
  for (int c; (c = getopt_long(argc, argv, "h", kLong, &index)) != -1;) {
    const char* const n = c >= kMode ? kLong[index].name : "";
    switch (c) {
      case kMode:
        if (auto m = mode_of(optarg)) o.shape.mode = *m;
        else refuse(std::string("--mode ") + optarg + ": no such mode");
        break;
      case kTransport:
        if (auto t = transport_of(optarg)) o.shape.transport = *t;
        else refuse(std::string("--transport ") + optarg + ": no such transport");
        break;
      case kLossless: o.shape.lossless = 1; break;
      case kQps: o.shape.qps = static_cast<std::uint32_t>(number(n, optarg, 1, kMaxQps)); break;
      case kSize: o.shape.size = static_cast<std::uint32_t>(number(n, optarg, kHeaderBytes, 1 << 20)); break;
      case kDepth: o.shape.depth = static_cast<std::uint32_t>(number(n, optarg, 4, 512)); break;
      case kSeed: o.shape.seed = number(n, optarg, 0, UINT64_MAX); break;
      case kSeconds: o.seconds = seconds(n, optarg); break;
      case kIterations: o.shape.iterations = number(n, optarg, 1, 1ull << 40); break;
      case kRate: o.shape.rate = static_cast<std::uint32_t>(number(n, optarg, 1, 100000000)); break;
      case kRetries: o.retries = static_cast<int>(number(n, optarg, 0, 7)); break;
      case kEvents: o.events = true; break;
      case kCqEx: o.cq_ex = true; break;
      case kWrApi: o.wr_api = true; break;
      case kAtomicWrite: o.atomic_write = true; break;
      case kRnr: o.rnr = true; break;
      case kMr: o.mr_mb = static_cast<int>(number(n, optarg, 0, 65536)); break;
      case kMrFill: o.mr_fill_mb = static_cast<int>(number(n, optarg, 0, 65536)); break;
      case kMrParts: o.mr_parts = static_cast<int>(number(n, optarg, 0, 65536)); break;
      case kRestFile: o.rest_file = optarg; break;
      case kRtsFile: o.rts_file = optarg; break;
      case kCloseFile: o.close_file = optarg; break;
      case kMemory: o.memory = memory_kinds(optarg); break;
      case kChurn: o.churn_ms = static_cast<int>(number(n, optarg, 1, 60000)); break;
      case kSrq: o.srq = true; break;
      case kNoLimit: o.srq_limit = false; break;
      case kAnyOrder: o.any_order = true; break;
      case kResize: o.resize = true; break;
      case kIova: o.iova = true; break;
      case kFork: o.forks = true; break;
      case kForkLater: o.forks_later = true; break;
      case kWindows: o.windows = true; break;
      case kInvalidate: o.invalidate = true; break;
      case kRereg: o.rereg = rereg_kinds(optarg); break;
      case kSecond: o.second = true; break;
      case kHold:
        o.hold = optarg;
        if (o.hold != "cm" && o.hold != "sqd" && o.hold != "readonly") refuse("--hold " + o.hold + ": want cm, sqd or readonly");
        break;
      case kQuery: o.query = true; break;
      case kDev: o.dev = optarg; break;
      case kIbPort: o.ib_port = static_cast<int>(number(n, optarg, 1, 255)); break;
      case kGidIndex: o.gid_index = static_cast<int>(number(n, optarg, 0, 255)); break;
      case kPort: o.port = static_cast<int>(number(n, optarg, 1, 65535)); break;
      case kBind: o.bind = optarg; break;
      case kConnect: o.connect = seconds(n, optarg); break;
      case kStall: o.stall = seconds(n, optarg); break;
      case kStopFile: o.stop_file = optarg; break;
      case kSamples: o.samples = optarg; break;
      case kStatus: o.status = optarg; break;
      case kJson: o.json = optarg; break;
      case 'h':
      case kHelpOption: std::fputs(kHelp, stdout); std::exit(kExitOk);
      default: refuse(std::string(argv[optind - 1]) + ": unknown option, or its value is missing");
    }
  }
  if (optind < argc) o.server = argv[optind++];
  if (optind < argc) refuse(std::string(argv[optind]) + ": one server only");
  if (o.shape.lossy() && (o.shape.mode == Mode::kRead || o.shape.mode == Mode::kAtomic))
    refuse("this transport has neither reads nor atomics; choose another --mode");
  if (!o.rts_file.empty() && (o.server.empty() || o.windows || o.invalidate || o.shape.lossy()))
    refuse("--rts-file is for the client, of RC, without memory windows");
  if (o.atomic_write && (!o.wr_api || o.shape.lossy())) refuse("--atomic-write is for RC with --wr-api");
  if (o.rereg.translation && o.iova) refuse("--rereg translation is for memory at its own address; leave out --iova");
  if (o.invalidate && (o.wr_api || o.shape.lossy())) refuse("--invalidate is for RC without --wr-api");
  // Memory of one end: four rings per QP.
  if (static_cast<std::uint64_t>(o.shape.qps) * o.shape.window() * o.shape.size > (1u << 28))
    refuse("--qps, --depth and --size together need more than 1 GB; take one down");
  return o;
}

}  // namespace verify
