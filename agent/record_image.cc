// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "record_image.h"

#include <fcntl.h>

#include <memory>

#include "migr/restore.h"

namespace migr {
namespace {

struct Release {
  void operator()(migr_rst* s) const { migr_rst_close(s); }
  void operator()(migr_rst_image* i) const { migr_rst_image_free(i); }
  void operator()(migr_rst_process* p) const { migr_rst_process_free(p); }
};

}  // namespace

Status write_record_image(const std::vector<DescribedProcess>& processes, const std::string& dir) {
  migr_rst_err err{};
  auto failed = [&](int e) { return Error{-e, err.text[0] ? err.text : std::strerror(-e)}; };
  migr_rst* raw = nullptr;
  if (const int e = migr_rst_open(&raw, &err)) return failed(e);
  const std::unique_ptr<migr_rst, Release> session(raw);
  const std::unique_ptr<migr_rst_image, Release> image(migr_rst_image_new());
  if (!image) return Error{ENOMEM, "out of memory for the record"};
  for (const auto& p : processes) {
    migr_rst_process* dumped = nullptr;
    if (const int e = migr_rst_dump(session.get(), static_cast<std::uint32_t>(p.pid), &dumped, &err)) return failed(e);
    std::unique_ptr<migr_rst_process, Release> process(dumped);
    if (const int e = migr_rst_process_describe(dumped, p.fds.data(), static_cast<std::uint32_t>(p.fds.size()), p.instance.data()))
      return failed(e);
    if (const int e = migr_rst_process_check(dumped, &err)) return failed(e);
    if (const int e = migr_rst_image_add(image.get(), dumped)) return failed(e);
    (void)process.release();
  }
  const Fd fd(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.n < 0) return sys_error("opening " + dir);
  if (const int e = migr_rst_write(image.get(), fd.n, &err)) return failed(e);
  return {};
}

}  // namespace migr
