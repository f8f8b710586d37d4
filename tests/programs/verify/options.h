// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The command line of migr_verify.
#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace verify {

enum Exit { kExitOk = 0, kExitFaults = 1, kExitUsage = 2, kExitSetup = 3, kExitSkip = 4 };

enum class MemoryKind { kPrivate, kThp, kHugetlb, kShared, kMemfd };

/// --rereg: what ibv_rereg_mr changes of what the partner writes to and reads.
struct Rereg {
  bool access = false, pd = false, translation = false;
  bool any() const { return access || pd || translation; }
};

struct Options {
  Shape shape;
  std::string server;      // empty: be the server
  std::string bind;        // own address; empty: any
  std::string dev;         // empty: the first with an active port
  int port = 18525;        // TCP
  int ib_port = 1;
  int gid_index = -1;      // -1: the RoCE v2 one with an IPv4 address, else the first
  int retries = 7;
  bool events = false;
  bool cq_ex = false;      // poll with the extended interface
  bool wr_api = false;
  bool atomic_write = false;
  bool rnr = false;        // post too few receives on purpose
  bool srq = false;        // all QPs receive from one SRQ
  bool srq_limit = true;   // whose limit is armed all the time
  bool any_order = false;  // and whose receives need not be used in their order
  bool resize = false;     // CQs (and the SRQ) change their size under traffic, at the start
  bool iova = false;       // the partner addresses memory by other numbers than ours
  bool forks = false;      // a child, made after the set-up, keeps everything that it inherits
  bool forks_later = false;  // the same, when SIGUSR1 comes
  bool windows = false;    // the partner writes through memory windows, of type 1 and 2 in turn
  bool invalidate = false; // a further window of type 2 comes and goes
  bool target_atomics = false;  // the partner's may change what it writes to (failover_traffic)
  Rereg rereg;
  bool second = false;     // another context, idle; at the end it has to work
  std::string hold;        // keep an object of this kind beside the traffic: cm, sqd, readonly
  std::vector<MemoryKind> memory = {MemoryKind::kPrivate};  // of the registered regions, in turn
  bool query = false;      // at the end ibv_query_* must say what it said at the start
  int mr_mb = 0;           // memory that is registered for the partner to write to and never touched
  int mr_fill_mb = 0;      // so much of it was written to, at the start
  int mr_parts = 0;        // parts of it that are MRs of their own, too
  int churn_ms = 0;        // make and destroy resources beside the traffic; 0: do not
  double seconds = 0;      // 0: until stopped
  double stall = 120;      // seconds without any progress that are an error
  double connect = 30;     // seconds to wait for the partner
  std::string samples, status, json, stop_file;
  std::string rest_file;   // nothing is begun while it is there
  std::string rts_file;    // client: its QPs stay in RTR, and only answer, until it comes
  std::string close_file;  // client: its coming closes all RDMA, at both ends; memory and TCP stay
};

/// Ends the program on --help (status 0) and on a bad command line (kExitUsage, one line on stderr).
Options parse_options(int argc, char** argv);

}  // namespace verify
