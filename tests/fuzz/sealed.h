// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The envelope of migr's images, so that mutations need not get its checksum right; and their content as text, so that they need
// not get the lengths of nested messages right.
#pragma once

#include <endian.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <zlib.h>

#include "migr/restore.h"
#include "seeds.h"

constexpr std::size_t kEnvelope = 24;

/// restore/image.c: magic, version, CRC-32 and length of the payload, all little-endian.
inline std::string sealed(std::string_view magic, std::string_view payload) {
  const std::uint32_t version = htole32(MIGR_RST_IMAGE_VERSION);
  const std::uint32_t crc = htole32(static_cast<std::uint32_t>(crc32(0, reinterpret_cast<const Bytef*>(payload.data()), static_cast<uInt>(payload.size()))));
  const std::uint64_t bytes = htole64(payload.size());
  return (std::string(magic) + bytes_of(version) + bytes_of(crc) + bytes_of(bytes)).append(payload);
}

/// Empty: it is no text of one.
template <class Message>
std::string from_text(std::string_view text) {
  google::protobuf::TextFormat::Parser parser;
  struct Silent : google::protobuf::io::ErrorCollector {
    void AddError(int, int, const std::string&) override {}
  } silent;
  parser.RecordErrorsTo(&silent);
  Message m;
  return parser.ParseFromString(std::string(text), &m) ? m.SerializeAsString() : "";
}
template <class Message>
std::string to_text(const std::string& payload) {
  Message m;
  std::string out;
  return m.ParseFromString(payload) && google::protobuf::TextFormat::PrintToString(m, &out) ? out : "";
}

/// An input as a file: what begins with the magic as it is, else sealed: what it says as text, or it.
template <class Message>
std::string image_of(std::string_view magic, std::string_view input) {
  const std::string text = from_text<Message>(input);
  return !text.empty() ? sealed(magic, text) : input.starts_with(magic) ? std::string(input)
                                                                        : sealed(magic, input);
}
