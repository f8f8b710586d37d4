// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migrd: one per host. Runs in the foreground; SIGTERM and SIGINT end it.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "config.h"
#include "control_service.h"
#include "host_service.h"
#include "kernel_record.h"
#include "peer_link.h"
#include "pki.h"
#include "process_session.h"

namespace {

using namespace migr;

int fail(const std::string& text) {
  spdlog::critical("{}", text);
  return 1;
}

std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// The folder with exactly this mode, parents as usual.
Status make_dir(const std::string& dir, mode_t mode) {
  for (std::size_t at = 1; (at = dir.find('/', at)) != std::string::npos; at++)
    if (mkdir(dir.substr(0, at).c_str(), 0755) && errno != EEXIST) return sys_error("cannot make " + dir.substr(0, at));
  if (mkdir(dir.c_str(), mode) && errno != EEXIST) return sys_error("cannot make " + dir);
  if (chmod(dir.c_str(), mode)) return sys_error("chmod of " + dir);
  return {};
}

int run(const Config& config) {
  auto files = pki::load(config.pki);
  if (!files) return fail(files.error().text);
  for (auto [dir, mode] : {std::pair{config.run_dir, 0755}, {parent_of(config.control_socket), 0700}, {config.state_dir, 0700}})
    if (auto s = make_dir(dir, static_cast<mode_t>(mode)); !s) return fail(s.error().text);
  const Fd lock(open((config.state_dir + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.n < 0 || flock(lock.n, LOCK_EX | LOCK_NB)) return fail("another migrd runs with " + config.state_dir);
  if (auto k = KernelRecord::open(); !k) spdlog::warn("{}; this host cannot take part in migrations until then", k.error().text);

  Peers peers(config, *files);
  SessionTable sessions;
  HostService host(config, sessions, {});
  ControlService control(peers, sessions, [](const wire::MigrateRequest&, const ControlService::Say&) { return wire::Summary(); });

  if (auto s = sessions.start(config.run_dir + "/proc.sock", {}); !s) return fail(s.error().text);

  grpc::ServerBuilder outer;
  set_keepalive(outer);
  outer.AddListeningPort(config.listen, peers.server_credentials());
  outer.RegisterService(&host);
  outer.SetMaxReceiveMessageSize(2 * static_cast<int>(kChunkBytes) + (1 << 20));
  const auto outer_server = outer.BuildAndStart();
  if (!outer_server) return fail("cannot listen on " + config.listen + " (in use, or a certificate that does not fit its key)");

  unlink(config.control_socket.c_str());
  grpc::ServerBuilder inner;
  inner.AddListeningPort("unix:" + config.control_socket, grpc::InsecureServerCredentials());
  inner.RegisterService(&control);
  const mode_t old = umask(0177);
  const auto inner_server = inner.BuildAndStart();
  umask(old);
  if (!inner_server) return fail("cannot listen on " + config.control_socket);

  spdlog::info("migrd {} on {}: peers at {}, processes at {}/proc.sock", kRelease, config.name, config.listen, config.run_dir);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  int sig = 0;
  sigwait(&set, &sig);
  spdlog::info("ends by signal {}", sig);
  const auto soon = std::chrono::system_clock::now() + std::chrono::seconds(1);
  inner_server->Shutdown(soon);
  outer_server->Shutdown(soon);
  sessions.stop();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string path = kConfigPath;
  bool verbose = false;
  CLI::App app{"The migr daemon: one per host. migrd(8) says more.", "migrd"};
  app.set_version_flag("--version", kRelease);
  app.add_option("--config", path, "configuration")->capture_default_str();
  app.add_flag("-v,--verbose", verbose, "say more");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) ? 2 : 0;
  }
  // stdout is nobody's data here, but a log belongs to stderr.
  setenv("GRPC_VERBOSITY", "NONE", 0);  // what matters comes back as a status
  spdlog::set_default_logger(spdlog::stderr_color_mt("migrd"));
  spdlog::set_level(verbose ? spdlog::level::debug : spdlog::level::info);
  spdlog::flush_on(spdlog::level::info);
  if (geteuid() != 0) return fail("has to run as root: it stops processes, reads the kernel's record and runs containers");
  // Every thread inherits it: only sigwait() below sees them.
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  umask(0077);
  auto config = load_config(path);
  if (!config) return fail(config.error().text);
  return run(*config);
}
