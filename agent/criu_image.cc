// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "criu_image.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "file_tree.h"

namespace migr {
namespace {

constexpr std::uint32_t kImageMagic = 0x54564319;

}  // namespace

CriuImage::CriuImage(const std::string& path) : bytes_(text_of(path)) {}

bool CriuImage::is(std::uint32_t magic) {
  std::uint32_t m[2];
  return number(m[0]) && number(m[1]) && m[0] == kImageMagic && m[1] == magic;
}

bool CriuImage::next(google::protobuf::Message& m) {
  std::uint32_t size;
  if (!number(size) || bytes_.size() - at_ < size || !m.ParseFromArray(bytes_.data() + at_, static_cast<int>(size))) return false;
  at_ += size;
  return true;
}

bool CriuImage::number(std::uint32_t& n) {
  if (bytes_.size() - at_ < sizeof n) return false;
  memcpy(&n, bytes_.data() + at_, sizeof n);
  at_ += sizeof n;
  return true;
}

NewCriuImage::NewCriuImage(std::uint32_t magic) {
  number(kImageMagic);
  number(magic);
}

void NewCriuImage::add(const google::protobuf::Message& m) {
  number(static_cast<std::uint32_t>(m.ByteSizeLong()));
  m.AppendToString(&bytes_);
}

Status NewCriuImage::replace(const std::string& path) const {
  namespace fs = std::filesystem;
  const std::string part = path + ".part";
  std::ofstream f(part, std::ios::binary | std::ios::trunc);
  f << bytes_ << std::flush;
  std::error_code ec;
  fs::permissions(part, fs::status(path, ec).permissions(), ec);
  if (!f || ec || rename(part.c_str(), path.c_str())) return sys_error("writing " + path, ec ? ec.value() : errno);
  return {};
}

Error damaged_image(const std::string& path) { return {EIO, path + ": damaged"}; }

}  // namespace migr
